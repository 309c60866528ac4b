//! Layers and batches drawn from a seed, in families that each look for one kind of fault.

use super::case::{Case, Random};
use crate::reference::math;
use crate::types::{Activation, LayerShape, WeightFormat, XType};
use std::fmt;
use std::str::FromStr;

/// What kind of values a case is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Random codes, scales over eight and hidden states over sixteen powers of two; one pair in eight is skipped.
    Random,
    /// Every code under every block scale but the NaNs (MXFP4: every scale of w2, those of w13 up to 2^-3); alphas of both signs, one
    /// expert's are 0.
    Codes,
    /// Block scales, weights and hidden states at and below the smallest normal numbers of e4m3, f16 and bf16.
    Subnormal,
    /// Few NaNs and infinities: in hidden states, block scales and weights of pairs. Most tokens stay finite.
    Special,
    /// Sums that overflow f16, bf16 or f32, and that cancel.
    Extreme,
    /// Ids of every kind: -1, the least i32, E and above, duplicates, tokens without any expert.
    Ids,
    /// Every pair on the last expert.
    OneExpert,
}

impl Family {
    /// All families.
    pub const ALL: [Family; 7] = [
        Family::Random,
        Family::Codes,
        Family::Subnormal,
        Family::Special,
        Family::Extreme,
        Family::Ids,
        Family::OneExpert,
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Random => "random",
            Family::Codes => "codes",
            Family::Subnormal => "subnormal",
            Family::Special => "special",
            Family::Extreme => "extreme",
            Family::Ids => "ids",
            Family::OneExpert => "one-expert",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Family {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || Family::ALL.map(Family::name).join(", ");
        Family::ALL.into_iter().find(|family| family.name() == name).ok_or_else(|| format!("one of {} needed", known()))
    }
}

/// An NVFP4 case of `family` for `tokens` tokens, the same for the same arguments. x is bf16; [`Case::x_as_f16`] converts it. `shape` must
/// pass [`crate::plan::check`].
pub fn draw(family: Family, shape: LayerShape, tokens: usize, seed: u64) -> Case {
    draw_in(WeightFormat::Nvfp4, family, shape, tokens, seed)
}

/// As [`draw`], with weights in `format`. Scales of MXFP4 are for bf16 activations; [`Case::fit_f16`] moves them into f16's range.
pub fn draw_in(format: WeightFormat, family: Family, shape: LayerShape, tokens: usize, seed: u64) -> Case {
    let mut case = Case::random_in(format, shape, tokens, seed);
    // Another stream than that of `Case::random`.
    let mut random = Random(!seed);
    match family {
        Family::Random => {}
        Family::Codes => codes(&mut case, &mut random),
        Family::Subnormal => subnormal(&mut case, &mut random),
        Family::Special => special(&mut case, &mut random),
        Family::Extreme => extreme(&mut case, &mut random),
        Family::Ids => ids(&mut case, &mut random),
        Family::OneExpert => case.topk_ids.fill(shape.experts as i32 - 1),
    }
    case
}

fn codes(case: &mut Case, random: &mut Random) {
    if case.options.format == WeightFormat::Mxfp4 {
        // Small weights harm nobody; large ones of w13 would make every output infinite, those of w2 one column.
        let (mut first, mut second) = (shuffled((0..=124).collect(), random), shuffled((0..=254).collect(), random));
        case.s13.fill_with(|| first.next().expect("a cycle never ends"));
        for expert in 0..case.shape.experts {
            for row in 0..case.shape.output {
                let byte = second.next().expect("a cycle never ends");
                for block in 0..case.shape.intermediate / 32 {
                    case.set_s2(expert, row, block, byte.saturating_sub(random.below(4) as u8));
                }
            }
        }
        case.fill_padding(0xff);
        case.topk_w.fill_with(|| random.signed(2.0));
        return;
    }
    // Block b has scale byte b mod 254 of a shuffled list, so that all occur however small the case is.
    let mut bytes = shuffled((0..=255).filter(|byte| byte & 0x7f != 0x7f).collect(), random);
    case.fill_scales(|| bytes.next().expect("a cycle never ends"));
    case.fill_padding(0xff);
    case.alpha1.fill_with(|| [random.signed(0.01), random.signed(0.01)]);
    case.alpha2.fill_with(|| random.signed(1.0));
    case.topk_w.fill_with(|| random.signed(2.0));
    let dead = random.below(case.shape.experts);
    case.alpha1[dead] = [0.0; 2];
    case.alpha2[dead] = 0.0;
}

/// `bytes` in random order, again and again.
fn shuffled(mut bytes: Vec<u8>, random: &mut Random) -> impl Iterator<Item = u8> + use<> {
    for i in (1..bytes.len()).rev() {
        bytes.swap(i, random.below(i + 1));
    }
    bytes.into_iter().cycle()
}

fn subnormal(case: &mut Case, random: &mut Random) {
    if case.options.format == WeightFormat::Mxfp4 {
        // Gates of about 2^-120 with ups of about 1 give an h among the smallest bf16; down makes some of them large again.
        let LayerShape { hidden, intermediate, output, experts, .. } = case.shape;
        for expert in 0..experts {
            for row in 0..2 * intermediate {
                for block in 0..hidden / 32 {
                    let byte = if row < intermediate { 120 + random.below(8) } else { random.below(16) };
                    case.set_s13(expert, row, block, byte as u8);
                }
            }
            for row in 0..output {
                for block in 0..intermediate / 32 {
                    let byte = if row % 4 == 0 { random.below(140) } else { 215 + random.below(40) };
                    case.set_s2(expert, row, block, byte as u8);
                }
            }
        }
    } else {
        // 0x00 to 0x0f are zero, the subnormals and the first normals; the sign bit at random.
        case.fill_scales(|| (random.below(16) | (random.below(2) << 7)) as u8);
    }
    case.x.fill_with(|| match random.below(8) {
        // bf16 subnormals of either sign, and its smallest normals.
        0 | 1 => (random.below(0x100) | (random.below(2) << 15)) as u16,
        // Around and below f16's smallest normal, 2^-14.
        2..=4 => bf16(random.signed(1.0) * 2f32.powi(-13 - random.below(13) as i32)),
        _ => bf16(random.signed(1.0)),
    });
    if case.options.format == WeightFormat::Mxfp4 {
        return;
    }
    // Some experts' products stay near 1, others' fall below the f32 or f16 range.
    case.alpha1.fill_with(|| {
        [random.signed(1.0), random.signed(1.0)].map(|a| a * 2f32.powi(20 - 20 * random.below(7) as i32))
    });
    case.alpha2.fill_with(|| random.signed(1.0) * 2f32.powi(-(random.below(120) as i32)));
}

fn special(case: &mut Case, random: &mut Random) {
    let LayerShape { hidden, intermediate, output, experts, top_k } = case.shape;
    let nans: [u8; 2] = if case.options.format == WeightFormat::Mxfp4 { [0xff; 2] } else { [0x7f, 0xff] };
    let block_size = case.block();
    const VALUES: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for token in (0..case.tokens).filter(|token| token % 4 == 1) {
        let value = VALUES[random.below(3)];
        case.set_x(token, random.below(hidden), value);
        if random.below(2) == 0 {
            case.set_x(token, random.below(hidden), -value);
        }
    }
    // One row of w13 poisons all outputs of its expert, one row of w2 a single column: the former only for one expert.
    if experts > 1 {
        let (row, block) = (random.below(2 * intermediate), random.below(hidden / block_size));
        case.set_s13(random.below(experts), row, block, nans[random.below(2)]);
    }
    for _ in 0..experts {
        let (row, block) = (random.below(output), random.below(intermediate / block_size));
        case.set_s2(random.below(experts), row, block, nans[random.below(2)]);
    }
    for token in (0..case.tokens).filter(|token| token % 4 == 2) {
        // A weight of 0 is no skip: 0·NaN is NaN.
        let weight = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0][random.below(5)];
        case.topk_w[token * top_k + random.below(top_k)] = weight;
    }
}

fn extreme(case: &mut Case, random: &mut Random) {
    let hidden = case.shape.hidden;
    for token in 0..case.tokens {
        // By token: within f16's range, beyond it, near bf16's largest, and mixed with tiny ones.
        let largest = [6e4, 1e6, 3e38, 3e38][token % 4];
        for k in 0..hidden {
            let tiny = token % 4 == 3 && random.below(4) != 0;
            case.x[token * hidden + k] = bf16(random.signed(if tiny { 1e-3 } else { largest }));
        }
    }
    let experts = case.shape.experts;
    if case.options.format == WeightFormat::Mxfp4 {
        let bytes = |from: usize, random: &mut Random| (from + random.below(15)) as u8;
        let (first, second) = (case.s13.len() / experts, case.s2.len() / experts);
        for expert in 0..experts {
            let (low1, low2) = [(119, 119), (0, 240), (104, 0), (240, 119)][expert % 4];
            case.s13[expert * first..][..first].fill_with(|| bytes(low1, random));
            case.s2[expert * second..][..second].fill_with(|| bytes(low2, random));
        }
        case.topk_w.fill_with(|| random.signed(1.0) * [1.0, 1e-6, 3e38][random.below(3)]);
        return;
    }
    case.fill_scales(|| ((0x70 + random.below(0x0f)) | (random.below(2) << 7)) as u8);
    for expert in 0..experts {
        let alpha = [1.0, 1e-3, 1e-38, 1e30][expert % 4];
        case.alpha1[expert] = [random.signed(alpha), random.signed(alpha)];
        case.alpha2[expert] = [1.0, 1e-30, 3e38][random.below(3)];
    }
    case.topk_w.fill_with(|| random.signed(1.0) * [1.0, 1e-6, 3e38][random.below(3)]);
}

fn ids(case: &mut Case, random: &mut Random) {
    let LayerShape { experts, top_k, .. } = case.shape;
    let last = experts as i32 - 1;
    for (token, ids) in case.topk_ids.chunks_mut(top_k).enumerate() {
        match token % 4 {
            // No expert at all.
            0 => ids.fill_with(|| [-1, i32::MIN, last + 1, i32::MAX][random.below(4)]),
            // One expert in every slot.
            1 => ids.fill(random.below(experts) as i32),
            // First, last and the ids next to them.
            2 => ids.fill_with(|| [-1, 0, last, last + 1][random.below(4)]),
            _ => ids.fill_with(|| random.below(experts) as i32),
        }
    }
}

fn bf16(value: f32) -> u16 {
    math::from_f32(Activation::Bf16, value)
}

impl Case {
    /// The same hidden states as f16, for an f16 layer. Finite ones stay finite: f16's largest number takes their place.
    pub fn x_as_f16(mut self) -> Self {
        if self.x_type == XType::Bf16 {
            for bits in &mut self.x {
                let value = math::to_f32(Activation::Bf16, *bits);
                let value = if value.is_finite() { value.clamp(-65504.0, 65504.0) } else { value };
                *bits = math::from_f32(Activation::F16, value);
            }
            self.x_type = XType::F16;
        }
        self
    }

    /// Every block scale, padding included, from `next`.
    fn fill_scales(&mut self, mut next: impl FnMut() -> u8) {
        self.s13.fill_with(&mut next);
        self.s2.fill_with(&mut next);
    }
}

impl Random {
    /// Uniform in 0..n.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in (-most, most).
    fn signed(&mut self, most: f32) -> f32 {
        // Scaled after the draw: the width of the interval may be no f32.
        self.in_range(-1.0, 1.0) * most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff::floats;
    use crate::reference::Mode;

    const SHAPE: LayerShape = LayerShape { hidden: 80, intermediate: 32, output: 24, experts: 5, top_k: 3 };

    /// A family that gave only NaN or only zeros would find nothing.
    #[test]
    fn families_are_not_degenerate() {
        for format in WeightFormat::ALL {
            let shape = LayerShape { hidden: SHAPE.hidden.next_multiple_of(format.block()), ..SHAPE };
            for (family, f16) in Family::ALL.into_iter().flat_map(|family| [(family, false), (family, true)]) {
                // NVFP4 needs no scales moved; extreme hidden states are beyond f16 by intention.
                if f16 && (format == WeightFormat::Nvfp4 || family == Family::Extreme) {
                    continue;
                }
                let mut case = draw_in(format, family, shape, 12, 7);
                if f16 {
                    case = case.fit_f16();
                    case.options.activation = Activation::F16;
                }
                let out = floats(&case.run(Mode::Exact).unwrap().out);
                let useful = out.iter().filter(|value| value.is_finite() && **value != 0.0).count();
                let what =
                    format!("{format} {family}, f16 {f16}: {useful} of {} outputs are finite and not 0", out.len());
                assert!(useful * 8 >= out.len(), "{what}");
            }
        }
    }

    #[test]
    fn families_contain_what_they_promise() {
        let codes = draw(Family::Codes, LayerShape { hidden: 256, ..SHAPE }, 4, 1);
        for byte in (0..=255u8).filter(|byte| byte & 0x7f != 0x7f) {
            assert!(codes.s13.contains(&byte), "{byte:#04x}");
        }
        let special = draw(Family::Special, SHAPE, 12, 1);
        let out = floats(&special.run(Mode::Exact).unwrap().out);
        assert!(out.iter().any(|value| value.is_nan()));
        let extreme = draw(Family::Extreme, SHAPE, 40, 1);
        assert!(floats(&extreme.run(Mode::Exact).unwrap().out).iter().any(|value| value.is_infinite()));
        let mut f16 = draw(Family::Extreme, SHAPE, 12, 1);
        f16.options.activation = Activation::F16;
        assert!(f16.run(Mode::Exact).unwrap().status.f16_range);
        let ids = draw(Family::Ids, SHAPE, 8, 1);
        assert!(ids.topk_ids.contains(&-1) && ids.topk_ids.contains(&5) && ids.run(Mode::Exact).unwrap().status.bad_id);
    }

    #[test]
    fn draws_depend_on_the_seed_alone() {
        for family in Family::ALL {
            let [a, b, c] = [1, 1, 2].map(|seed| draw(family, SHAPE, 4, seed));
            assert_eq!((&a.x, &a.s13, &a.topk_w), (&b.x, &b.s13, &b.topk_w));
            assert_ne!((&a.x, &a.w13), (&c.x, &c.w13));
        }
    }
}
