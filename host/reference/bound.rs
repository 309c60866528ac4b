//! How far two ways of forming the same sums can be apart.

use super::fp4::{Fp4View, LayerInputs, convert_x, for_all_rows, route_prep, steps, unfold, zeros};
use super::math;
use super::mma::LANES;
use crate::error::Result;
use crate::{Activation, Gating, LayerOptions, LayerShape};

/// Bound on the difference between a sum formed by the tensor cores and the same sum formed in f64 and rounded to f32.
///
/// `magnitude` is Σ|a|·|b|, where a subnormal operand counts as the smallest normal (products are not renormalised before
/// they are aligned). An instruction truncates 17 terms to a grid of 2^(emax-25) and its result to 24 bits, so it loses
/// less than 5.25·2^-23 of the largest value it meets; `split` partial sums are added with one rounding each. In the order
/// `decode` sum and magnitude are those of the weights as they enter the instructions.
pub fn sum_bound(cols: usize, split: usize, magnitude: f64) -> f64 {
    let steps = steps(cols) as f64;
    let relative = steps * 5.25 * 2f64.powi(-23) + (split + 1) as f64 * 2f64.powi(-24);
    magnitude * relative.exp_m1() + steps * 2f64.powi(-149)
}

/// A value and how far any of the ways may be from it.
#[derive(Clone, Copy, Default)]
struct Near {
    value: f64,
    error: f64,
}

impl Near {
    /// The largest magnitude that any of the ways may have.
    fn magnitude(self) -> f64 {
        self.value.abs() + self.error
    }

    /// Allows for roundings on both sides: `relative` of the magnitude, and `absolute` for subnormals. Beyond `max` a
    /// rounding may have given an infinity and nothing can be said.
    fn rounded(self, relative: f64, absolute: f64, max: f64) -> Near {
        let error = self.error + relative * self.magnitude() + absolute;
        // Written so that NaN counts as beyond.
        Near { error: if self.value.abs() + error < max { error } else { f64::INFINITY }, ..self }
    }

    /// Allows for a few f32 roundings.
    fn rounded_f32(self) -> Near {
        self.rounded(2f64.powi(-22), 2f64.powi(-147), 3e38)
    }

    fn rounded_to(self, format: Activation) -> Near {
        match format {
            Activation::Bf16 => self.rounded(2f64.powi(-7), 2f64.powi(-132), 3e38),
            Activation::F16 => self.rounded(2f64.powi(-10), 2f64.powi(-23), 65_504.0),
        }
    }
}

/// Bound on |a - b| for every element of the output [M, H], where a and b are results of any two of: the exact mode
/// (in any split, where the order is `seed`), the fast mode, and hardware whose sums stay within [`sum_bound`]. Infinite where
/// values may leave the range of their format or are not finite to begin with. It is a worst case over all roundings, far
/// above what is usual.
pub fn layer_bound(view: &Fp4View<'_>, options: &LayerOptions, inputs: &LayerInputs<'_>) -> Result<Vec<f32>> {
    view.check()?;
    view.check_with(options)?;
    let LayerShape { hidden, intermediate, output, experts, top_k } = view.shape;
    let format = options.activation;
    inputs.check(&view.shape, format)?;
    let split = options.order.partials();
    // What a sum is multiplied by in the end: the smallest normal weight, and what is lost to subnormals, are larger by that.
    let unfold = f64::from(unfold(options.order, view.format, format));
    let route = route_prep(inputs.topk_ids, top_k, experts)?;
    let (x, _) = convert_x(inputs, &view.shape, format, &route)?;
    let x = x.iter().map(|&bits| f64::from(math::to_f32(format, bits))).collect::<Vec<_>>();
    let smallest_normal = if format == Activation::Bf16 { 2f64.powi(-126) } else { 2f64.powi(-14) };

    // Σ w·x around values that are themselves only near.
    let dot = |weights: &[f64], values: &mut dyn Iterator<Item = Near>, split: usize| -> Near {
        let (mut value, mut error, mut magnitude) = (0.0, 0.0, 0.0);
        for (w, x) in weights.iter().zip(values) {
            value += w * x.value;
            error += w.abs() * x.error;
            let weight = if *w == 0.0 { 0.0 } else { w.abs().max(smallest_normal * unfold) };
            magnitude += weight * x.magnitude().max(smallest_normal);
        }
        // A sum may pass the range on its way and end inside it. Written so that NaN counts as beyond.
        let error = if magnitude < 3e38 {
            error + 2.0 * unfold * sum_bound(weights.len(), split, magnitude / unfold)
        } else {
            f64::INFINITY
        };
        Near { value, error }.rounded_f32()
    };
    let scaled = |factor: f64, y: Near| Near { value: factor * y.value, error: factor.abs() * y.error }.rounded_f32();
    let biased = |y: Near, bias: Option<f32>| match bias {
        Some(bias) => Near { value: y.value + f64::from(bias), ..y }.rounded_f32(),
        None => y,
    };

    let mut h = zeros(Near::default(), &route, intermediate)?;
    for_all_rows(&route, intermediate, &mut h, |expert, first, pairs| {
        let [alpha_up, alpha_gate] = view.alpha1[expert].map(f64::from);
        let matrix = view.fc1(expert);
        let row = |row: usize| matrix.row(format, row);
        let rows: [_; LANES] = std::array::from_fn(|lane| {
            let n = (first + lane).min(intermediate - 1);
            (row(n), row(intermediate + n))
        });
        let element = |pair: &usize, lane: usize| {
            let x = || x[pair / top_k * hidden..][..hidden].iter().map(|&value| Near { value, error: 0.0 });
            let n = (first + lane).min(intermediate - 1);
            let bias = |row: usize| view.b13.map(|b13| b13[expert * 2 * intermediate + row]);
            let mut up = biased(scaled(alpha_up, dot(&rows[lane].0, &mut x(), split)), bias(n));
            let mut gate = biased(scaled(alpha_gate, dot(&rows[lane].1, &mut x(), split)), bias(intermediate + n));
            if let Some(limit) = options.gating.limit().map(f64::from) {
                // Clamping never takes two values further apart.
                up.value = up.value.clamp(-limit, limit);
                gate.value = gate.value.min(limit);
            }
            // f(g) = g·sigmoid(factor·g) has a slope of at most 1.1 (with a factor of 0: 1/2).
            // The product with the factor is rounded: 2^-24 of at most 104, in the exponent.
            let (factor, up, relative) = match options.gating {
                Gating::Silu { .. } => (1.0, up, 2f64.powi(-20)),
                Gating::SwigluOai { alpha, .. } => {
                    (f64::from(alpha), Near { value: up.value + 1.0, ..up }.rounded_f32(), 2f64.powi(-16))
                }
            };
            let activated = gate.value / (1.0 + (-factor * gate.value).exp());
            // Where exp overflows, f itself is below 1e-36 / factor.
            let tiny = if factor.abs() < 1.0 { 1e-36 / factor.abs().max(1e-30) } else { 1e-36 };
            let activated = Near { value: activated, error: 1.1 * gate.error }.rounded(relative, tiny, 3e38);
            let error = activated.error * up.magnitude() + activated.value.abs() * up.error;
            Near { value: activated.value * up.value, error }.rounded_f32().rounded_to(format)
        };
        pairs.iter().map(|pair| std::array::from_fn(|lane| element(pair, lane))).collect()
    });

    let mut ypart = zeros(Near::default(), &route, output)?;
    for_all_rows(&route, output, &mut ypart, |expert, first, pairs| {
        let matrix = view.fc2(expert);
        let rows: [_; LANES] = std::array::from_fn(|lane| matrix.row(format, (first + lane).min(output - 1)));
        let element = |pair: usize, lane: usize| {
            let y = dot(&rows[lane], &mut h[pair * intermediate..][..intermediate].iter().copied(), 1);
            let (alpha, weight) = (view.alpha2[expert], inputs.topk_w[pair]);
            match view.b2 {
                Some(b2) => {
                    let bias = b2[expert * output + (first + lane).min(output - 1)];
                    scaled(f64::from(weight), biased(scaled(f64::from(alpha), y), Some(bias)))
                }
                None => scaled(f64::from(math::canonical(alpha * weight)), y),
            }
        };
        pairs.iter().map(|&pair| std::array::from_fn(|lane| element(pair, lane))).collect()
    });

    let mut bound = Vec::with_capacity(inputs.tokens * output);
    for token in 0..inputs.tokens {
        for column in 0..output {
            let pairs = (token * top_k..(token + 1) * top_k).filter(|&pair| route.expert_of(pair).is_some());
            let (mut sum, mut magnitude) = (Near::default(), 0.0);
            for pair in pairs {
                let y = ypart[pair * output + column];
                sum = Near { value: sum.value + y.value, error: sum.error + y.error };
                magnitude += y.magnitude();
            }
            sum.error += magnitude * top_k as f64 * 2f64.powi(-23);
            let in_range = magnitude < 3e38;
            bound.push(if in_range { sum.rounded_to(Activation::Bf16).error as f32 } else { f32::INFINITY });
        }
    }
    Ok(bound)
}
