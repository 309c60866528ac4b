//! The CPU references of the operations around the grouped GEMMs, against values known beforehand.

use megamoe::diff::Random;
use megamoe::formats;
use megamoe::reference::mma::NAN;
use megamoe::reference::*;
use megamoe::{Activation, Error, Gating, Groups, Routing, Scoring};

/// What `ln` is off at most, in ulps, over every positive f32.
const LN_ULP: f64 = 0.830;

/// FNV over 64-bit words.
fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01b3))
}

fn argument_of<T>(result: megamoe::Result<T>) -> &'static str {
    match result.err() {
        Some(Error::Argument { name, .. } | Error::BufferLength { name, .. } | Error::Experts { name, .. }) => name,
        Some(other) => panic!("{other}"),
        None => panic!("no error"),
    }
}

/// bf16 bits of values that bf16 holds exactly.
fn bf16(values: &[f32]) -> Vec<u16> {
    let bits = values.iter().map(|&x| math::from_f32(Activation::Bf16, x)).collect::<Vec<_>>();
    assert!(values.iter().zip(&bits).all(|(x, &b)| x.is_nan() || math::to_f32(Activation::Bf16, b) == *x));
    bits
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

// ---- math -----------------------------------------------------------------------------------------------------------

/// Largest distance of `ln` from f64's, in ulps of the result, over every `step`-th positive f32 of the range.
fn largest_ln_error(ln: impl Fn(f32) -> f32, range: std::ops::Range<u32>, step: usize) -> f64 {
    let mut largest = 0f64;
    for bits in range.step_by(step) {
        let x = f32::from_bits(bits);
        let (given, wanted) = (ln(x), f64::from(x).ln());
        if wanted == 0.0 {
            assert_eq!(given.to_bits(), 0);
        } else {
            let ulp = 2f64.powi(wanted.abs().log2().floor() as i32 - 23);
            largest = largest.max((f64::from(given) - wanted).abs() / ulp);
        }
    }
    largest
}

#[test]
fn ln_is_within_one_ulp() {
    let largest = largest_ln_error(math::ln, 1..f32::INFINITY.to_bits(), 211);
    assert!(largest <= LN_ULP, "{largest}");
    assert!(largest > 0.7, "{largest}");
    // Around 1 each value counts.
    let around_one = largest_ln_error(math::ln, 0.999f32.to_bits()..1.001f32.to_bits(), 1);
    assert!(around_one <= LN_ULP, "{around_one}");
    // Without the second part of ln 2 the bound does not hold.
    let coarse = |x: f32| math::ln(x) + 2.121_944_4e-4 * x.log2().round();
    assert!(largest_ln_error(coarse, 1..f32::INFINITY.to_bits(), 20_011) > 10.0);
}

#[test]
fn ln_has_the_specified_bits() {
    for (x, y) in [
        (1.0, 0),
        (2.0, 0x3f31_7218),
        (0.0, 0xff80_0000),
        (-0.0, 0xff80_0000),
        (f32::INFINITY, 0x7f80_0000),
        (-1.0, NAN),
        (f32::NEG_INFINITY, NAN),
        (f32::NAN, NAN),
        (f32::from_bits(0xffc0_0001), NAN),
        // 149 ln 2 = 103.27893, and 128 ln 2 = 88.72284.
        (f32::from_bits(1), 0xc2ce_8ed0),
        (f32::MAX, 0x42b1_7218),
    ] {
        assert_eq!(math::ln(x).to_bits(), y, "ln({x:e})");
    }
    let words = (1..f32::INFINITY.to_bits()).step_by(40_009).map(|x| u64::from(math::ln(f32::from_bits(x)).to_bits()));
    assert_eq!(hash(words), 0x1dbb_aec0_cff0_7d08);
}

#[test]
fn softplus_is_near_its_definition() {
    let mut largest = 0f64;
    for i in -100 * 512..=21 * 512 {
        let x = i as f32 / 512.0;
        let error = (f64::from(math::softplus(x)) - f64::from(x).exp().ln_1p()).abs();
        largest = largest.max(error / f64::from(x).exp().ln_1p().max(1.0));
    }
    // 1 + exp(x) has one rounding, half an ulp of 1; the rest is what exp and ln are off.
    assert!(largest < 1.3e-7, "{largest}");
    for (x, y) in [(20.5, 20.5), (f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, 0.0), (-20.0, 0.0)] {
        assert_eq!(math::softplus(x).to_bits(), y.to_bits(), "{x}");
    }
    assert_eq!(math::softplus(0.0).to_bits(), std::f32::consts::LN_2.to_bits());
    assert_eq!(math::softplus(f32::NAN).to_bits(), NAN);
}

/// The encoder of the references against the one of the formats, which works on bits.
#[test]
fn e4m3_codes_agree_with_the_formats_encoder() {
    for x in (0..=u32::MAX).step_by(10_007).map(f32::from_bits) {
        assert_eq!(math::to_e4m3(x), formats::e4m3::encode(x), "{x:e}");
    }
    for code in (0..0x7e).flat_map(|code| [code, code | 0x80]) {
        let (x, next) = (math::e4m3(code), math::e4m3(code + 1));
        assert_eq!(math::to_e4m3(x), code);
        let middle = (x + next) / 2.0;
        assert_eq!(math::to_e4m3(middle), code + (code & 1), "{middle}");
        assert_eq!(math::to_e4m3(f32::from_bits(middle.to_bits() - 1)), code);
        assert_eq!(math::to_e4m3(f32::from_bits(middle.to_bits() + 1)), code + 1);
    }
    for (x, code) in [(f32::INFINITY, 0x7e), (-1e30, 0xfe), (464.0, 0x7e), (f32::NAN, 0x7f), (-0.0, 0x80), (1e-30, 0)] {
        assert_eq!(math::to_e4m3(x), code, "{x}");
    }
}

// ---- topk -----------------------------------------------------------------------------------------------------------

const SCORINGS: [Scoring; 4] = [Scoring::Softmax, Scoring::SelectedSoftmax, Scoring::Sigmoid, Scoring::SqrtSoftplus];

fn routing(scoring: Scoring, top_k: usize) -> Routing {
    Routing { scoring, top_k, renormalize: true, groups: None, scale: 1.0 }
}

fn near(given: &[f32], wanted: &[f32]) {
    assert!(given.len() == wanted.len() && given.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{given:?}");
}

#[test]
fn c1_nan_logits_pick_distinct_experts() {
    for scoring in SCORINGS {
        let result = topk(&[f32::NAN; 256], 256, None, &routing(scoring, 8)).unwrap();
        assert_eq!(result.ids, [0, 1, 2, 3, 4, 5, 6, 7], "{scoring:?}");
        assert_eq!(bits(&result.weights), [NAN; 8], "{scoring:?}");
        // One NaN among numbers comes last, and only its own weight is NaN where no sum is formed.
        let plain = Routing { renormalize: false, ..routing(scoring, 3) };
        let result = topk(&[1.0, f32::NAN, 2.0], 3, None, &plain).unwrap();
        assert_eq!(result.ids, [2, 0, 1], "{scoring:?}");
        let alone = matches!(scoring, Scoring::Sigmoid | Scoring::SqrtSoftplus);
        assert_eq!(result.weights.iter().map(|w| w.is_nan()).collect::<Vec<_>>(), [!alone, !alone, true]);
    }
}

#[test]
fn c3_infinite_logits() {
    const MINUS: f32 = f32::NEG_INFINITY;
    for scoring in [Scoring::Softmax, Scoring::SelectedSoftmax] {
        let result = topk(&[0.0, MINUS, 0.0, MINUS, MINUS], 5, None, &routing(scoring, 4)).unwrap();
        assert_eq!((result.ids, result.weights), (vec![0, 2, 1, 3], vec![0.5, 0.5, 0.0, 0.0]));
        let result = topk(&[1000.0, 999.0, -1000.0], 3, None, &routing(scoring, 2)).unwrap();
        assert_eq!(result.ids, [0, 1]);
        near(&result.weights, &[0.731_058_6, 0.268_941_4]);
    }
    for scoring in SCORINGS {
        for renormalize in [true, false] {
            let routing = Routing { renormalize, scale: 2.0, ..routing(scoring, 3) };
            let result = topk(&[MINUS; 5], 5, None, &routing).unwrap();
            assert_eq!((result.ids, result.weights), (vec![0, 1, 2], vec![2.0 / 3.0; 3]));
        }
        // A bias still chooses where the scores are numbers.
        let result = topk(&[MINUS; 3], 3, Some(&[0.0, 1.0, 2.0]), &routing(scoring, 1)).unwrap();
        let by_bias = matches!(scoring, Scoring::Sigmoid | Scoring::SqrtSoftplus);
        assert_eq!((result.ids, result.weights), (vec![if by_bias { 2 } else { 0 }], vec![1.0]));
    }
    let result = topk(&[0.0, f32::INFINITY, 1.0], 3, None, &routing(Scoring::Softmax, 2)).unwrap();
    assert_eq!((result.ids, bits(&result.weights)), (vec![1, 2], vec![NAN; 2]));
}

const C5: [(usize, [i32; 8]); 3] = [
    (160, [147, 134, 121, 108, 95, 82, 69, 56]),
    (384, [83, 166, 249, 332, 31, 114, 197, 280]),
    (60, [47, 34, 21, 8, 55, 42, 29, 16]),
];

#[test]
fn c5_expert_counts_that_are_no_powers_of_two() {
    for (experts, ids) in C5 {
        for tokens in [1, 33] {
            let row = (0..experts).map(|e| ((37 * e) % experts) as f32 / 16.0).collect::<Vec<_>>();
            for scoring in [Scoring::Softmax, Scoring::SelectedSoftmax] {
                let result = topk(&row.repeat(tokens), experts, None, &routing(scoring, 8)).unwrap();
                assert_eq!(result.ids, ids.repeat(tokens));
                assert!(result.weights.chunks(8).all(|weights| *weights == result.weights[..8]));
            }
        }
    }
}

#[test]
fn c7_top_k_outside_the_experts() {
    let plain = |top_k| routing(Scoring::Softmax, top_k);
    assert_eq!(argument_of(topk(&[0.0; 4], 4, None, &plain(8))), "top_k");
    assert_eq!(argument_of(topk(&[0.0; 4], 4, None, &plain(0))), "top_k");
    assert_eq!(argument_of(topk(&[], 0, None, &plain(1))), "num_experts");
    let error = topk(&[0.0; 4], 4, None, &plain(8)).unwrap_err().to_string();
    assert!(error.contains("`top_k` is 8"), "{error}");
    let all = topk(&[1.0, 3.0, 2.0, 3.0], 4, None, &plain(4)).unwrap();
    assert_eq!(all.ids, [1, 3, 2, 0]);
    assert_eq!(argument_of(topk(&[0.0; 5], 4, None, &plain(1))), "logits");
    assert_eq!(argument_of(topk(&[0.0; 4], 4, Some(&[0.0; 3]), &plain(1))), "bias");
    let grouped = |count, keep| Routing { groups: Some(Groups { count, keep }), ..plain(3) };
    for (count, keep) in [(0, 1), (3, 1), (2, 0), (2, 3), (2, 1)] {
        assert_eq!(argument_of(topk(&[0.0; 4], 4, None, &grouped(count, keep))), "groups", "{count} {keep}");
    }
    assert_eq!(topk(&[], 4, None, &plain(2)).unwrap(), TopK { ids: vec![], weights: vec![] });
}

#[test]
fn topk_ties_go_to_the_lower_id() {
    let logits = [-0.0, 1.0, 0.0, 1.0, f32::NAN, -5.0];
    let result = topk(&logits, 6, None, &routing(Scoring::Softmax, 6)).unwrap();
    assert_eq!(result.ids, [1, 3, 0, 2, 5, 4]);
}

#[test]
fn topk_weights_by_hand() {
    // sigmoid(0) = 1/2, and a bias chooses without entering the weight.
    let sigmoid = Routing { renormalize: false, scale: 3.0, ..routing(Scoring::Sigmoid, 1) };
    let result = topk(&[4.0, 0.0], 2, Some(&[0.0, 1.0]), &sigmoid).unwrap();
    assert_eq!((result.ids, result.weights), (vec![1], vec![1.5]));
    let result = topk(&[0.0, 0.0, -1.0], 3, None, &routing(Scoring::Sigmoid, 2)).unwrap();
    assert_eq!((result.ids, result.weights), (vec![0, 1], vec![0.5, 0.5]));
    // Scores that underflow: 0/(0 + 1e-20), no NaN.
    let result = topk(&[-200.0; 2], 2, None, &routing(Scoring::Sigmoid, 2)).unwrap();
    assert_eq!(result.weights, [0.0, 0.0]);
    let plain = |scoring| Routing { renormalize: false, ..routing(scoring, 1) };
    // Above 20 softplus is the identity.
    let result = topk(&[25.0, 1.0], 2, None, &plain(Scoring::SqrtSoftplus)).unwrap();
    assert_eq!(result.weights, [5.0]);
    near(&topk(&[0.0], 1, None, &plain(Scoring::SqrtSoftplus)).unwrap().weights, &[0.832_554_6]);
    // Softmax over all experts, over the chosen ones, and renormalised.
    let logits = [0.0; 4];
    assert_eq!(topk(&logits, 4, None, &plain(Scoring::Softmax)).unwrap().weights, [0.25]);
    assert_eq!(topk(&logits, 4, None, &plain(Scoring::SelectedSoftmax)).unwrap().weights, [1.0]);
    assert_eq!(topk(&logits, 4, None, &routing(Scoring::Softmax, 2)).unwrap().weights, [0.5, 0.5]);
    // Softmax with a bias chooses by p + bias: 0.2 + 1 beats 0.8; by l + bias expert 0 would win.
    let logits = [4f32.ln(), 0.0];
    let result = topk(&logits, 2, Some(&[0.0, 1.0]), &plain(Scoring::Softmax)).unwrap();
    assert_eq!(result.ids, [1]);
    near(&result.weights, &[0.2]);
    let result = topk(&logits, 2, Some(&[0.0, 1.0]), &plain(Scoring::SelectedSoftmax)).unwrap();
    assert_eq!((result.ids, result.weights), (vec![0], vec![1.0]));
}

#[test]
fn topk_softmax_sums_in_32_partials() {
    // 1, then terms of just below 2^-24: a sum in order of e loses each of them.
    let mut logits = vec![-16.64; 64];
    logits[0] = 0.0;
    let small = math::exp(-16.64);
    assert!(1.0 + small == 1.0);
    let plain = Routing { renormalize: false, ..routing(Scoring::Softmax, 1) };
    let weight = topk(&logits, 64, None, &plain).unwrap().weights[0];
    // Lane 0 is 1 + small = 1, each other lane 2·small, whose sums are exact. The five
    // additions to lane 0 begin with 2·small, which is above half an ulp.
    let mut sum = 1.0f32;
    for count in [1, 2, 4, 8, 16] {
        sum += 2.0 * count as f32 * small;
    }
    assert_eq!(weight, 1.0 / sum);
    assert_ne!(weight, 1.0);
}

#[test]
fn topk_groups_by_hand() {
    let grouped = |count, keep, top_k| Routing {
        groups: Some(Groups { count, keep }),
        renormalize: false,
        ..routing(Scoring::SelectedSoftmax, top_k)
    };
    // Sums of the two best: 9, 10, 10, -: the group of the largest logit is out, a tie goes to the lower group.
    let logits = [9.0, 0.0, 0.0, 5.0, 5.0, 0.0, 6.0, 4.0, 0.0, f32::NAN, 50.0, f32::NAN];
    let ids = |routing| topk(&logits, 12, None, &routing).unwrap().ids;
    assert_eq!(ids(grouped(4, 1, 3)), [3, 4, 5]);
    assert_eq!(ids(grouped(4, 2, 3)), [6, 3, 4]);
    assert_eq!(ids(grouped(4, 3, 3)), [0, 6, 3]);
    // The last group's sum is NaN: 50 + NaN. It is kept last, but then its 50 is the first choice.
    assert_eq!(ids(grouped(4, 4, 12)), [10, 0, 6, 3, 4, 7, 1, 2, 5, 8, 9, 11]);
    // Groups of one.
    assert_eq!(ids(grouped(12, 2, 2)), [10, 0]);
    // Groups go by the choice, bias included.
    let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0];
    assert_eq!(topk(&logits, 12, Some(&bias), &grouped(4, 1, 2)).unwrap().ids, [3, 4]);
    let bias = bias.map(|b| 4.0 * b);
    assert_eq!(topk(&logits, 12, Some(&bias.map(|b| b * 2.5)), &grouped(4, 1, 2)).unwrap().ids, [6, 8]);
}

/// Another way to choose: rounds of "better than all others that are left".
#[test]
fn topk_chooses_as_rounds_of_argmax_do() {
    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, 1.0, 1.5, -2.0, f32::MIN_POSITIVE];
    let mut random = Random(7);
    for experts in [1usize, 2, 31, 33, 64, 100] {
        for _ in 0..20 {
            let logits = (0..experts).map(|_| values[random.next() as usize % values.len()]).collect::<Vec<_>>();
            let mut left = (0..experts).collect::<Vec<_>>();
            let mut wanted = Vec::new();
            while let Some(&first) = left.first() {
                let mut best = first;
                for &e in &left {
                    if logits[e] > logits[best] || logits[best].is_nan() && !logits[e].is_nan() {
                        best = e;
                    }
                }
                left.retain(|&e| e != best);
                wanted.push(best as i32);
            }
            for top_k in [1, experts.div_ceil(2), experts] {
                let result = topk(&logits, experts, None, &routing(Scoring::Softmax, top_k)).unwrap();
                assert_eq!(result.ids, wanted[..top_k]);
            }
        }
    }
}

#[test]
fn scale_rows_by_hand() {
    // 1 + 2^-8 and 1 + 3·2^-8 are ties of bf16: down to 1, up to 1 + 2^-6.
    let x = bf16(&[1.0, -2.0, 1.0, f32::NAN]);
    let weights = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 0.5, 7.0];
    let out = scale_rows(&x, 2, &[0, 2, 1, -1], &weights, 2, 3).unwrap();
    assert_eq!(out, [0x3f80, 0xc000, 0x3f82, 0xc002, 0x3f00, 0x7fff, 0, 0]);
    assert_eq!(scale_rows(&x, 2, &[3, i32::MIN, 3, i32::MAX], &weights, 2, 3).unwrap(), [0; 8]);
    assert_eq!(argument_of(scale_rows(&x, 2, &[0; 3], &weights, 2, 3)), "ids");
    assert_eq!(argument_of(scale_rows(&x, 3, &[0; 4], &weights, 2, 3)), "x");
    assert_eq!(argument_of(scale_rows(&x, 0, &[0; 4], &weights, 2, 3)), "hidden");
}

// ---- router ---------------------------------------------------------------------------------------------------------

#[test]
fn router_orders_by_hand() {
    const BIG: f32 = 16_777_216.0; // 2^24: +1 is lost, +2 is not
    let one = |k| bf16(&vec![1.0; k]);
    // In order each 1 is lost. In the tree 1 is lost twice (distances 4 and 2), then 1 + 1 of the odd lanes is added.
    let w = bf16(&[BIG, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(router_gemm_strict(&one(5), &w, 5).unwrap(), bf16(&[BIG]));
    assert_eq!(router_gemm(&one(5), &w, None, 5).unwrap(), [BIG + 2.0]);
    // k = 32 and 64 belong to the partial of k = 0, k = 33 and 65 to that of k = 1.
    let mut w = vec![0.0; 66];
    (w[0], w[32], w[64]) = (BIG, 1.0, 1.0);
    assert_eq!(router_gemm(&one(66), &bf16(&w), None, 66).unwrap(), [BIG]);
    (w[32], w[64], w[33], w[65]) = (0.0, 0.0, 1.0, 1.0);
    assert_eq!(router_gemm(&one(66), &bf16(&w), None, 66).unwrap(), [BIG + 2.0]);
    // The bias comes last, with a rounding of its own.
    assert_eq!(router_gemm(&one(66), &bf16(&w), Some(&[2.0]), 66).unwrap(), [BIG + 4.0]);
    assert_eq!(router_gemm(&one(66), &bf16(&w), Some(&[1.0]), 66).unwrap(), [BIG + 4.0]);
    // The one rounding to bf16 is to nearest even.
    assert_eq!(router_gemm_strict(&one(2), &bf16(&[1.0, 1.0 / 256.0]), 2).unwrap(), [0x3f80]);
    assert_eq!(router_gemm_strict(&one(2), &bf16(&[1.0, 3.0 / 256.0]), 2).unwrap(), [0x3f82]);
}

#[test]
fn router_layout_and_special_values() {
    // Two tokens, three experts.
    let x = bf16(&[1.0, 2.0, 3.0, -1.0]);
    let w = bf16(&[1.0, 0.0, 0.0, 1.0, 2.0, 2.0]);
    assert_eq!(router_gemm(&x, &w, None, 2).unwrap(), [1.0, 2.0, 6.0, 3.0, -1.0, 4.0]);
    assert_eq!(router_gemm(&x, &w, Some(&[0.5, 0.0, 1.0]), 2).unwrap(), [1.5, 2.0, 7.0, 3.5, -1.0, 5.0]);
    assert_eq!(router_gemm_strict(&x, &w, 2).unwrap(), bf16(&[1.0, 2.0, 6.0, 3.0, -1.0, 4.0]));
    let nan = [0x7f80, 0xffff];
    assert_eq!(bits(&router_gemm(&nan, &bf16(&[0.0, 0.0]), None, 2).unwrap()), [NAN]);
    assert_eq!(router_gemm_strict(&nan, &bf16(&[0.0, 0.0]), 2).unwrap(), [0x7fff]);
    assert!(router_gemm(&[], &w, None, 2).unwrap().is_empty());
    assert_eq!(argument_of(router_gemm(&x, &w, None, 3)), "x");
    assert_eq!(argument_of(router_gemm(&x, &w[..5], None, 2)), "weight");
    assert_eq!(argument_of(router_gemm(&x, &[], None, 2)), "num_experts");
    assert_eq!(argument_of(router_gemm(&x, &w, None, 0)), "hidden");
    assert_eq!(argument_of(router_gemm(&x, &w, Some(&[0.0]), 2)), "bias");
    assert_eq!(argument_of(router_gemm_strict(&x, &[], 2)), "num_experts");
}

// ---- gate_topk ------------------------------------------------------------------------------------------------------

const ONE: u8 = 0x38;

/// Codes of a gate whose logits are ((37·e) mod E)/16 for x = [1/16, 1/4, 1, 4, 16, 0, …]: base-4 digits.
fn c5_gate(experts: usize) -> (Vec<u16>, Vec<u8>) {
    let mut x = vec![0.0; 16];
    x[..5].copy_from_slice(&[0.0625, 0.25, 1.0, 4.0, 16.0]);
    let mut codes = vec![0u8; experts * 8];
    for e in 0..experts {
        let mut n = (37 * e) % experts;
        for k in 0..5 {
            codes[e * 8 + k / 2] |= [0, 2, 4, 5][n % 4] << (4 * (k % 2));
            n /= 4;
        }
    }
    (bf16(&x), codes)
}

#[test]
fn c5_through_the_gate() {
    for (experts, ids) in C5 {
        let (x, codes) = c5_gate(experts);
        let scales = vec![ONE; experts];
        let logits = gate_logits(&x, &codes, &scales, 1.0, 16).unwrap();
        assert!(logits.iter().enumerate().all(|(e, &l)| l == ((37 * e) % experts) as f32 / 16.0));
        let result = gate_topk(&x.repeat(3), &codes, &scales, 1.0, 16, 8, true).unwrap();
        assert_eq!(result.ids, ids.repeat(3));
        let chosen = topk(&logits.repeat(3), experts, None, &routing(Scoring::SelectedSoftmax, 8)).unwrap();
        assert_eq!(result, chosen);
        let plain = gate_topk(&x, &codes, &scales, 1.0, 16, 8, false).unwrap();
        assert_eq!(plain.ids, ids);
        // Neighbours in rank are 1/16 apart.
        let wanted = (0..8).map(|t| math::exp(-0.0625 * t as f32)).collect::<Vec<_>>();
        assert_eq!(plain.weights, wanted);
    }
}

#[test]
fn gate_logits_by_hand() {
    for hidden in [16, 528, 1040] {
        let logits =
            gate_logits(&bf16(&vec![1.0; hidden]), &vec![0x22; hidden / 2], &vec![ONE; hidden / 16], 1.0, hidden);
        assert_eq!(logits.unwrap(), [hidden as f32]);
    }
    const BIG: f32 = 16_777_216.0;
    let mut x = vec![1.0; 32 * 16 + 16];
    x[0] = BIG;
    let logit = |nonzero: &[usize], x: &[f32]| {
        let mut codes = vec![0u8; x.len() / 2];
        for &k in nonzero {
            codes[k / 2] |= 2 << (4 * (k % 2));
        }
        gate_logits(&bf16(x), &codes, &vec![ONE; x.len() / 16], 1.0, x.len()).unwrap()[0]
    };
    // A byte's two products are added to each other first.
    assert_eq!(logit(&[0, 2, 3], &x), BIG + 2.0);
    assert_eq!(logit(&[0, 3, 4], &x), BIG);
    // Block 32 is the same partial as block 0; block 1 is another, so that its two ones meet before they meet BIG.
    assert_eq!(logit(&[0, 512, 514], &x), BIG);
    assert_eq!(logit(&[0, 16, 18], &x), BIG + 2.0);
    // code 0x7 = 6, scale byte 0x01 = 2^-9, scale2 = 2^8: 3. The high nibble is the odd k. -0x3 = -1.5.
    let logits =
        gate_logits(&bf16(&[&[1.0, 4.0][..], &[0.0; 14]].concat()), &[0xb7, 0, 0, 0, 0, 0, 0, 0], &[1], 256.0, 16);
    assert_eq!(logits.unwrap(), [3.0 - 3.0]);
}

#[test]
fn gate_special_values() {
    // A NaN scale makes its expert the last one.
    let x = bf16(&[1.0; 16]);
    let codes = [0x22; 3 * 8];
    let result = gate_topk(&x, &codes, &[0x7f, 0x30, ONE], 1.0, 16, 3, false).unwrap();
    assert_eq!(result.ids, [2, 1, 0]);
    assert_eq!(bits(&result.weights), [1f32.to_bits(), math::exp(-8.0).to_bits(), NAN]);
    // All logits -inf.
    let minus = bf16(&[f32::NEG_INFINITY; 16]);
    for normalize in [true, false] {
        let result = gate_topk(&minus, &codes, &[ONE; 3], 1.0, 16, 2, normalize).unwrap();
        assert_eq!((result.ids, result.weights), (vec![0, 1], vec![0.5, 0.5]));
    }
    for top_k in [0, 4] {
        assert_eq!(argument_of(gate_topk(&x, &codes, &[ONE; 3], 1.0, 16, top_k, true)), "top_k");
    }
    assert_eq!(argument_of(gate_topk(&x, &[], &[], 1.0, 16, 1, true)), "num_experts");
    assert_eq!(argument_of(gate_logits(&x, &codes, &[ONE; 3], 1.0, 8)), "hidden");
    assert_eq!(argument_of(gate_logits(&x, &codes, &[ONE; 2], 1.0, 16)), "scales");
    assert_eq!(argument_of(gate_logits(&x[1..], &codes, &[ONE; 3], 1.0, 16)), "x");
}

// ---- sort, worklist -------------------------------------------------------------------------------------------------

#[test]
fn sort_by_hand() {
    // Three tokens of two; expert 2 is not resident, 4 is no expert.
    let ids = [3, 0, 0, 2, 4, 3];
    let sorted = sort_by_expert(&ids, 2, &[true, true, false, true]).unwrap();
    assert_eq!(sorted.expert_offsets, [0, 2, 2, 2, 4]);
    assert_eq!(sorted.sorted_token_ids, [0, 1, 0, 2, -1, -1]);
    assert_eq!(sorted.sorted_pairs, [1, 2, 0, 5, -1, -1]);
    assert_eq!(sorted.token_to_perm, [2, 0, 1, -1, -1, 3]);
    assert!(sorted.bad_expert_id);
    // Negative ids and experts that are not resident set no status; an expert twice in a token has two rows.
    let sorted = sort_by_expert(&[1, 1, -1, i32::MIN], 2, &[false, true]).unwrap();
    assert_eq!((sorted.expert_offsets, sorted.sorted_token_ids), (vec![0, 0, 2], vec![0, 0, -1, -1]));
    assert_eq!((sorted.token_to_perm, sorted.bad_expert_id), (vec![0, 1, -1, -1], false));
    let sorted = sort_by_expert(&[i32::MAX], 1, &[true]).unwrap();
    assert_eq!((sorted.expert_offsets, sorted.bad_expert_id), (vec![0, 0], true));
    let empty = sort_by_expert(&[], 8, &[true; 3]).unwrap();
    assert_eq!((empty.expert_offsets, empty.sorted_pairs), (vec![0; 4], vec![]));
    assert_eq!(argument_of(sort_by_expert(&ids, 4, &[true])), "ids");
    assert_eq!(argument_of(sort_by_expert(&ids, 0, &[true])), "top_k");
    assert_eq!(argument_of(sort_by_expert(&ids, 2, &[])), "num_experts");
    assert_eq!(argument_of(sort_by_expert(&ids, 2, &[true; 4097])), "num_experts");
}

/// Another way: a pair's row is the number of live pairs that come before it.
#[test]
fn sort_ranks_pairs() {
    let mut random = Random(3);
    for (experts, top_k, tokens) in [(1, 1, 5), (7, 3, 40), (256, 8, 30)] {
        let resident = (0..experts).map(|_| !random.next().is_multiple_of(4)).collect::<Vec<_>>();
        let ids = (0..tokens * top_k).map(|_| (random.next() % (experts as u64 + 3)) as i32 - 1).collect::<Vec<_>>();
        let sorted = sort_by_expert(&ids, top_k, &resident).unwrap();
        let live = |i: usize| ids[i] >= 0 && (ids[i] as usize) < experts && resident[ids[i] as usize];
        let mut rows = vec![-1; ids.len()];
        for i in 0..ids.len() {
            let before = (0..ids.len()).filter(|&j| live(j) && (ids[j], j) < (ids[i], i)).count();
            assert_eq!(sorted.token_to_perm[i], if live(i) { before as i32 } else { -1 });
            if live(i) {
                rows[before] = i as i32;
            }
        }
        assert_eq!(sorted.sorted_pairs, rows);
        let tokens = rows.iter().map(|&i| if i < 0 { -1 } else { i / top_k as i32 }).collect::<Vec<_>>();
        assert_eq!(sorted.sorted_token_ids, tokens);
        for e in 0..=experts {
            let before = (0..ids.len()).filter(|&i| live(i) && (ids[i] as usize) < e).count();
            assert_eq!(sorted.expert_offsets[e], before as i32);
        }
    }
}

#[test]
fn worklist_by_hand() {
    // 5, 0, 4 and 1 rows, the expert with 4 not resident.
    let offsets = [0, 5, 5, 9, 10];
    let resident = [true, true, false, true];
    let items = tile_worklist(&offsets, &resident, 2, 4).unwrap();
    assert_eq!(items, [[0, 0, 4, 0], [0, 0, 4, 1], [0, 4, 1, 0], [0, 4, 1, 1], [3, 9, 1, 0], [3, 9, 1, 1]]);
    let packed = tile_worklist_packed6(&offsets, &resident, 2, 4).unwrap();
    assert_eq!(packed, [[0, 0], [0, 1], [0, 64], [0, 65], [3, 0], [3, 1]]);
    assert_eq!(tile_worklist_packed6(&[0, 3], &[true], 64, 2).unwrap()[127], [0, 127]);
    assert!(tile_worklist(&[0, 0], &[true], 3, 4).unwrap().is_empty());
    assert_eq!(argument_of(tile_worklist_packed6(&offsets, &resident, 65, 4)), "n_tiles");
    assert_eq!(argument_of(tile_worklist_packed6(&[0, (1 << 26) + 1], &[true], 1, 1)), "n_tiles");
    assert_eq!(argument_of(tile_worklist(&offsets, &resident, 0, 4)), "n_tiles");
    assert_eq!(argument_of(tile_worklist(&offsets, &resident, 2, 0)), "m_tile");
    assert_eq!(argument_of(tile_worklist(&offsets, &resident[1..], 2, 4)), "expert_offsets");
    assert_eq!(argument_of(tile_worklist(&[0, 5, 4], &[true; 2], 2, 4)), "expert_offsets");
    assert_eq!(argument_of(tile_worklist(&[1, 5, 6], &[true; 2], 2, 4)), "expert_offsets");
    assert_eq!(argument_of(tile_worklist(&[0], &[], 2, 4)), "num_experts");
}

#[test]
fn worklist_capacity_holds_every_list() {
    assert_eq!(worklist_capacity(0, 8, 3, 64), 0);
    assert_eq!(worklist_capacity(65, 8, 3, 64), 30);
    assert_eq!(worklist_capacity(5, 8, 1, 64), 6);
    let mut random = Random(5);
    let mut closest = usize::MAX;
    for _ in 0..200 {
        let experts = 1 + random.next() as usize % 6;
        let mut offsets = vec![0];
        for _ in 0..experts {
            offsets.push(offsets.last().unwrap() + (random.next() % 10) as i32);
        }
        let items = tile_worklist(&offsets, &vec![true; experts], 2, 4).unwrap();
        let capacity = worklist_capacity(*offsets.last().unwrap() as usize, experts, 2, 4);
        closest = closest.min(capacity.checked_sub(items.len()).unwrap());
        // Every row of every column tile exactly once.
        let mut seen = vec![0; *offsets.last().unwrap() as usize * 2];
        for [expert, first, rows, column] in items {
            assert!((1..=4).contains(&rows));
            for row in first..first + rows {
                assert!((offsets[expert as usize]..offsets[expert as usize + 1]).contains(&(row as i32)));
                seen[row as usize * 2 + column as usize] += 1;
            }
        }
        assert!(seen.iter().all(|&times| times == 1));
    }
    assert!(closest <= 2, "{closest}");
}

// ---- quant, silu_mul ------------------------------------------------------------------------------------------------

#[test]
fn i1_all_zero_group() {
    for zero in [0u16, 0x8000] {
        let x = [vec![zero; 128], bf16(&[1.0; 128])].concat();
        let result = per_token_group_quant_fp8(&x, 1, 256, 256).unwrap();
        assert_eq!(result.scales, [1e-12, 1.0 / 448.0]);
        assert_eq!(result.codes, [[(zero >> 8) as u8; 128], [0x7e; 128]].concat());
    }
}

#[test]
fn i3_no_rows_or_columns() {
    for (rows, cols) in [(0, 128), (0, 0), (3, 0)] {
        let result = per_token_group_quant_fp8(&[], rows, cols, cols).unwrap();
        assert_eq!(result, Quantized { codes: vec![], scales: vec![] });
    }
}

#[test]
fn i5_floor_and_strides() {
    for amax in [1e-12f32, 1e-30, 2f32.powi(-133)] {
        let amax = math::from_f32(Activation::Bf16, amax);
        let mut x = [amax, 0, amax | 0x8000].repeat(60);
        let contiguous = per_token_group_quant_fp8(&x[..150], 1, 150, 150).unwrap();
        assert_eq!(contiguous.scales, [1e-12; 2]);
        for (&code, &bits) in contiguous.codes.iter().zip(&x) {
            let value = math::to_f32(Activation::Bf16, bits);
            assert!((math::e4m3(code) * 1e-12 - value).abs() <= (value.abs() / 16.0).max(1e-12));
        }
        // Rows further apart, with NaN between them.
        x.truncate(150);
        x.resize(160, 0x7fff);
        let strided = per_token_group_quant_fp8(&x.repeat(2)[..310], 2, 150, 160).unwrap();
        assert_eq!(strided.codes, contiguous.codes.repeat(2));
        assert_eq!(strided.scales, contiguous.scales.repeat(2));
    }
    // Where the floor begins: 448·1e-12.
    for (amax, floor) in [(4.4e-10f32, true), (4.6e-10, false)] {
        let x = [math::from_f32(Activation::Bf16, amax)];
        let result = per_token_group_quant_fp8(&x, 1, 1, 1).unwrap();
        assert_eq!(result.scales[0] == 1e-12, floor);
        assert_eq!(result.codes, [0x7e], "{amax}");
    }
}

#[test]
fn quant_by_hand() {
    // Scale 2: half of a value. 2.25 is a tie of e4m3 (2.25 is on the grid: step 0.25), 17 is one (16, 18): even is 16.
    let x = bf16(&[896.0, -896.0, 4.5, 34.0, 38.0, -1.0, 0.0, f32::NAN]);
    let result = per_token_group_quant_fp8(&x, 1, 8, 8).unwrap();
    assert_eq!(result.scales, [2.0]);
    assert_eq!(result.codes, [0x7e, 0xfe, 0x41, 0x58, 0x5a, 0xb0, 0x00, 0x7f]);
    // An infinity: its scale, zeros with their signs, and NaN for the infinities alone. Only in its own group.
    let mut x = vec![0x3f80; 130];
    (x[0], x[1], x[2]) = (0x7f80, 0xff80, 0xbf80);
    let result = per_token_group_quant_fp8(&x, 1, 130, 130).unwrap();
    assert_eq!(result.scales, [f32::INFINITY, 1.0 / 448.0]);
    assert_eq!((&result.codes[..4], &result.codes[127..]), (&[0x7f, 0x7f, 0x80, 0][..], &[0, 0x7e, 0x7e][..]));
    // Nothing but NaN.
    let result = per_token_group_quant_fp8(&[0xffff; 2], 2, 1, 1).unwrap();
    assert_eq!((result.codes, result.scales), (vec![0x7f; 2], vec![1e-12; 2]));
    // A division: of the values that a product with the reciprocal would give another code, each has the division's.
    let mut differ = 0;
    for amax in 0x4000..0x4080u16 {
        let scale = math::to_f32(Activation::Bf16, amax) / 448.0;
        for bits in 0x3c00..amax {
            let x = math::to_f32(Activation::Bf16, bits);
            let code = math::to_e4m3(x / scale);
            if code != math::to_e4m3(x * (1.0 / scale)) {
                differ += 1;
                let result = per_token_group_quant_fp8(&[amax, bits], 1, 2, 2).unwrap();
                assert_eq!(result.codes, [0x7e, code]);
            }
        }
    }
    assert!(differ > 0);
    assert_eq!(argument_of(per_token_group_quant_fp8(&[0; 7], 2, 4, 4)), "x");
    assert_eq!(argument_of(per_token_group_quant_fp8(&[0; 7], 2, 4, 3)), "stride");
}

const SILU: Gating = Gating::Silu { limit: None };

#[test]
fn h3_silu_of_large_negative_gates() {
    for gate in [-88.0, -89.0, -200.0, -1e30f32] {
        let gate = [math::from_f32(Activation::Bf16, gate)];
        let y = silu_mul(&gate, &bf16(&[3.0]), &SILU).unwrap()[0];
        let value = math::to_f32(Activation::Bf16, y);
        assert!(value.abs() <= 1e-35 && y & 0x8000 != 0, "{value}");
    }
    // -inf·0.
    assert_eq!(silu_mul(&[0xff80], &bf16(&[3.0]), &SILU).unwrap(), [0x7fff]);
}

#[test]
fn h6_limits() {
    let one = |g: f32, u: f32, gating| {
        math::to_f32(Activation::Bf16, silu_mul(&bf16(&[g]), &bf16(&[u]), &gating).unwrap()[0])
    };
    let limited = Gating::Silu { limit: Some(1.0) };
    assert_eq!(one(32.0, 32.0, limited), 0.730_468_75);
    assert!(one(-32.0, -32.0, limited).abs() <= 1e-6);
    assert_eq!(one(32.0, 32.0, SILU), 1024.0);
    assert_eq!(one(0.0, 5.0, SILU).to_bits(), 0);
    // 1 + 7 and 7·sigmoid(11.914), from above; both clamps on the other side: (-7 + 1)·small.
    let oai = Gating::SwigluOai { alpha: 1.702, limit: 7.0 };
    assert_eq!(one(100.0, 100.0, oai), 56.0);
    assert_eq!(one(100.0, -100.0, oai), -42.0);
    assert!(one(-100.0, 3.0, oai).abs() < 1e-30);
    // 1·sigmoid(1.702) = 0.84579, times 1.
    assert_eq!(one(1.0, 0.0, oai), 0.847_656_25);
    // A clamp passes NaN.
    for gating in [SILU, limited, oai] {
        assert_eq!(silu_mul(&[0xffc0, 0x3f80], &[0x3f80, 0x7fc0], &gating).unwrap(), [0x7fff; 2]);
    }
    for limit in [0.0, -1.0, f32::NAN] {
        assert_eq!(argument_of(silu_mul(&[], &[], &Gating::Silu { limit: Some(limit) })), "limit");
        assert_eq!(argument_of(silu_mul(&[], &[], &Gating::SwigluOai { alpha: 1.0, limit })), "limit");
    }
    assert_eq!(argument_of(silu_mul(&[], &[], &Gating::SwigluOai { alpha: f32::NAN, limit: 7.0 })), "alpha");
    assert_eq!(argument_of(silu_mul(&[0], &[0; 2], &SILU)), "up");
}

/// (g·sigmoid(g))·u and (g/(1 + exp(-g)))·u are two operations: the definition is the first.
#[test]
fn silu_mul_multiplies_by_the_sigmoid() {
    let gates = (0x3c00..0x4200u16).chain(0xbc00..0xc200).collect::<Vec<_>>();
    let mut differ = 0;
    for u in (0x3f80..0x4000).map(|bits| math::to_f32(Activation::Bf16, bits)) {
        let up = bf16(&vec![u; gates.len()]);
        let given = silu_mul(&gates, &up, &SILU).unwrap();
        for (&gate, &r) in gates.iter().zip(&given) {
            let g = math::to_f32(Activation::Bf16, gate);
            let sigmoid = 1.0 / (1.0 + math::exp(-g));
            assert_eq!(r, math::from_f32(Activation::Bf16, g * sigmoid * u));
            differ += usize::from(r != math::from_f32(Activation::Bf16, g / (1.0 + math::exp(-g)) * u));
        }
    }
    assert!(differ > 0);
}

#[test]
fn silu_mul_quant_by_hand() {
    // silu(32) = 32; 32·14 = 448: scale 1. The second row is zeros.
    let (gate, up) = (bf16(&[32.0, 32.0, 0.0, 0.0]), bf16(&[14.0, 7.0, 1.0, 1.0]));
    let result = silu_mul_quant_fp8(&gate, &up, 2, 2, &SILU).unwrap();
    assert_eq!((result.codes, result.scales), (vec![0x7e, 0x76, 0, 0], vec![1.0, 1e-12]));
    let limited = Gating::Silu { limit: Some(7.0) };
    let result = silu_mul_quant_fp8(&gate, &up, 2, 2, &limited).unwrap();
    assert_eq!(result.codes, [0x7e, 0x7e, 0, 0]);
    assert_eq!(argument_of(silu_mul_quant_fp8(&gate, &up, 2, 3, &SILU)), "gate");
}

// ---- unpermute ------------------------------------------------------------------------------------------------------

#[test]
fn k1_order_of_the_final_sum() {
    const BIG: f32 = 16_777_216.0;
    let y = bf16(&[128.0]);
    let weights = [131_072.0, 0.007_812_5, 0.007_812_5, -131_072.0];
    let sum = |weights: &[f32]| unpermute_reduce(&y, 1, &[0; 4], weights, 4, 1).unwrap();
    assert_eq!(weights.map(|w| w * 128.0), [BIG, 1.0, 1.0, -BIG]);
    for _ in 0..1000 {
        assert_eq!(sum(&weights), [0]);
    }
    // Another order of the same terms is told apart.
    assert_eq!(sum(&[weights[1], weights[2], weights[0], weights[3]]), bf16(&[2.0]));
}

#[test]
fn unpermute_skips_rows_that_are_not_live() {
    // Rows of two; row 2 is NaN and never live.
    let y = bf16(&[1.0, 2.0, 3.0, 4.0, f32::NAN, f32::NAN]);
    let rows = [1, 0, -1, 2, i32::MIN, i32::MAX, 0, 0];
    let weights = [2.0, 0.5, 9.0, 9.0, 9.0, 9.0, 1.0, 3.0];
    let out = unpermute_reduce(&y, 2, &rows, &weights, 2, 2).unwrap();
    assert_eq!(out, bf16(&[6.5, 9.0, 0.0, 0.0, 0.0, 0.0, 4.0, 8.0]));
    assert!(out[2..6].iter().all(|&bits| bits == 0));
    // A weight of 0 is not a skip.
    let out = unpermute_reduce(&y, 2, &[0, 2], &[1.0, 0.0], 2, 3).unwrap();
    assert_eq!(out, [0x7fff; 2]);
    // -0 alone becomes +0.
    assert_eq!(unpermute_reduce(&bf16(&[-0.0]), 1, &[0], &[1.0], 1, 1).unwrap(), [0]);
    assert!(unpermute_reduce(&[], 2, &[], &[], 2, 0).unwrap().is_empty());
    assert_eq!(argument_of(unpermute_reduce(&y, 2, &rows, &weights, 2, 4)), "y");
    assert_eq!(argument_of(unpermute_reduce(&y, 2, &rows, &weights, 2, -1)), "live_rows");
    assert_eq!(argument_of(unpermute_reduce(&y, 2, &rows, &weights[1..], 2, 2)), "weights");
    assert_eq!(argument_of(unpermute_reduce(&y, 2, &rows, &weights, 3, 2)), "token_to_perm");
    assert_eq!(argument_of(unpermute_reduce(&y, 0, &rows, &weights, 2, 2)), "width");
    assert_eq!(argument_of(unpermute_reduce(&y, 4, &rows, &weights, 2, 1)), "y");
}

#[test]
fn shared_gate_by_hand() {
    let ones = |k| bf16(&vec![1.0; k]);
    assert_eq!(shared_gate(&ones(6), None, 3).unwrap(), [1.0, 1.0]);
    assert_eq!(shared_gate(&bf16(&[0.0, 0.0, 1.0, 1.0]), Some(&bf16(&[1.0, -1.0])), 2).unwrap(), [0.5, 0.5]);
    let gate = shared_gate(&ones(300), Some(&ones(300)), 300).unwrap();
    assert_eq!(gate, [1.0]);
    near(&shared_gate(&bf16(&[2.0, -1.0]), Some(&bf16(&[1.0, 1.0])), 2).unwrap(), &[0.731_058_6]);
    // Where the order shows: 2^24 at k = 0, -2^24 in the last warp, ones elsewhere.
    const BIG: f32 = 16_777_216.0;
    let dot = |w: &[f32]| shared_gate(&ones(w.len()), Some(&bf16(w)), w.len()).unwrap()[0];
    let with = |values: &[(usize, f32)]| {
        let mut w = vec![0.0; 512];
        values.iter().for_each(|&(k, value)| w[k] = value);
        dot(&w)
    };
    // k = 256 is partial 0: lost there. k = 1 is met in the tree, k = 32 and 64 are other warps: each lost alone.
    for lost in [&[256usize][..], &[1], &[32], &[32, 64], &[288, 64]] {
        let ones = lost.iter().map(|&k| (k, 1.0)).chain([(0, BIG), (224, -BIG)]).collect::<Vec<_>>();
        assert_eq!(with(&ones), 0.5, "{lost:?}");
    }
    // Two of one warp are added first, and then count.
    for kept in [[1, 3], [32, 33], [32, 288], [1, 257]] {
        let ones = kept.iter().map(|&k| (k, 1.0)).chain([(0, BIG), (224, -BIG)]).collect::<Vec<_>>();
        assert_eq!(with(&ones), math::sigmoid(2.0), "{kept:?}");
    }
    assert_eq!(bits(&shared_gate(&[0x7f80], Some(&[0]), 1).unwrap()), [NAN]);
    assert_eq!(argument_of(shared_gate(&[0; 4], Some(&[0; 3]), 2)), "gate_weight");
    assert_eq!(argument_of(shared_gate(&[0; 4], None, 3)), "x");
    assert_eq!(argument_of(shared_gate(&[0; 4], None, 0)), "hidden");
}

#[test]
fn blend_by_hand() {
    let out = bf16(&[1.0, 2.0, 3.0, 4.0]);
    let shared = bf16(&[10.0, 20.0, 30.0, f32::NAN]);
    assert_eq!(blend(&out, &shared, &[0.5, 1.0]).unwrap(), bf16(&[6.0, 12.0, 33.0, f32::NAN]));
    // 0·NaN is NaN.
    assert_eq!(blend(&out, &shared, &[0.5, 0.0]).unwrap(), bf16(&[6.0, 12.0, 3.0, f32::NAN]));
    assert!(blend(&[], &[], &[]).unwrap().is_empty());
    assert_eq!(argument_of(blend(&out, &shared[1..], &[1.0])), "shared");
    assert_eq!(argument_of(blend(&out, &shared, &[1.0; 3])), "gate");
    assert_eq!(argument_of(blend(&out, &shared, &[])), "out");
}

#[test]
fn one_rounding_or_two() {
    // 1 + 2^-8 is a tie and becomes 1 when rounded alone; with 2^-8 of the shared expert it is 1 + 2^-7.
    let (y, shared) = (bf16(&[1.0, 1.0 / 256.0]), bf16(&[1.0 / 256.0]));
    let args = (&[0, 1][..], &[1.0, 1.0][..]);
    assert_eq!(unpermute_blend(&y, 1, args.0, args.1, 2, 2, &shared, &[1.0]).unwrap(), [0x3f80]);
    assert_eq!(weighted_sum_blend(&y, 1, args.0, args.1, 2, 2, &shared, &[1.0]).unwrap(), [0x3f81]);
    let reduced = unpermute_reduce(&y, 1, args.0, args.1, 2, 2).unwrap();
    assert_eq!(blend(&reduced, &shared, &[1.0]).unwrap(), [0x3f80]);
    // The factor counts in both.
    assert_eq!(weighted_sum_blend(&y, 1, args.0, args.1, 2, 2, &shared, &[3.0]).unwrap(), [0x3f82]);
    assert_eq!(argument_of(weighted_sum_blend(&y, 1, args.0, args.1, 2, 2, &[0; 2], &[1.0])), "shared");
}

// ---- gemm -----------------------------------------------------------------------------------------------------------

/// A grouped GEMM with operands of its own. Values beside the scales are 1 unless a test changes them.
#[derive(Clone)]
struct Problem {
    kind: GemmKind,
    n: usize,
    k: usize,
    offsets: Vec<i32>,
    ids: Option<Vec<i32>>,
    /// bf16 bits, or e4m3 codes.
    a: Vec<u16>,
    a_scale: Vec<f32>,
    weights: Vec<Option<Vec<u16>>>,
    b_scale: Vec<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

const KINDS: [GemmKind; 4] = [GemmKind::Fp8, GemmKind::W8a8, GemmKind::W8a8Native, GemmKind::Bf16];

/// Whether activations are e4m3.
fn is_w8a8(kind: GemmKind) -> bool {
    matches!(kind, GemmKind::W8a8 | GemmKind::W8a8Native)
}

impl Problem {
    fn ones(kind: GemmKind, n: usize, k: usize, offsets: &[i32]) -> Self {
        let (experts, rows, groups) = (offsets.len() - 1, offsets[offsets.len() - 1] as usize, k.div_ceil(128));
        let one = |fp8| if fp8 { u16::from(ONE) } else { 0x3f80 };
        Problem {
            kind,
            n,
            k,
            offsets: offsets.to_vec(),
            ids: None,
            a: vec![one(is_w8a8(kind)); rows * k],
            a_scale: vec![1.0; rows * groups],
            weights: vec![Some(vec![one(kind != GemmKind::Bf16); n * k]); experts],
            b_scale: vec![vec![1.0; n.div_ceil(128) * groups]; experts],
            bias: None,
        }
    }

    /// Values over several powers of two, so that orders of sums show; scales likewise.
    fn random(kind: GemmKind, n: usize, k: usize, offsets: &[i32], seed: u64) -> Self {
        let mut random = Random(seed);
        let mut problem = Problem::ones(kind, n, k, offsets);
        // e4m3: any sign, exponents 4 to 11. bf16: |x| in 2^-8 to 2.
        let mut value = |fp8: bool| {
            let word = random.next();
            if fp8 {
                (word as u16 & 0x80) | (0x20 + (word >> 8) % 0x40) as u16
            } else {
                (word as u16 & 0x8000) | (0x3b80 + (word >> 16) % 0x480) as u16
            }
        };
        problem.a.fill_with(|| value(is_w8a8(kind)));
        for weights in problem.weights.iter_mut().flatten() {
            weights.fill_with(|| value(kind != GemmKind::Bf16));
        }
        problem.a_scale.fill_with(|| random.in_range(0.01, 0.1));
        for scales in &mut problem.b_scale {
            scales.fill_with(|| random.in_range(-0.1, 0.1));
        }
        problem
    }

    fn with<T>(&self, then: impl FnOnce(&GroupedGemm<'_>) -> T) -> T {
        let codes = |values: &[u16]| values.iter().map(|&code| code as u8).collect::<Vec<_>>();
        let a_codes = codes(&self.a);
        let codes = self.weights.iter().map(|weights| weights.as_deref().map(codes)).collect::<Vec<_>>();
        let weights = (0..self.weights.len())
            .map(|e| {
                let weights = self.weights[e].as_deref()?;
                Some(match self.kind {
                    GemmKind::Bf16 => Operand::Bf16(weights),
                    _ => Operand::E4m3 { codes: codes[e].as_deref()?, scales: &self.b_scale[e] },
                })
            })
            .collect::<Vec<_>>();
        let a = match self.kind {
            kind if is_w8a8(kind) => Operand::E4m3 { codes: &a_codes, scales: &self.a_scale },
            _ => Operand::Bf16(&self.a),
        };
        then(&GroupedGemm {
            kind: self.kind,
            n: self.n,
            k: self.k,
            expert_offsets: &self.offsets,
            sorted_token_ids: self.ids.as_deref(),
            a,
            weights: &weights,
            bias: self.bias.as_deref(),
        })
    }

    /// The output of `rows` rows that all held 0x5A5A.
    fn output(&self, rows: usize) -> Vec<u16> {
        let mut out = vec![0x5a5a; rows * self.n];
        self.with(|gemm| gemm.run(&mut out)).unwrap();
        out
    }

    /// The output as numbers, [rows][N].
    fn values(&self) -> Vec<Vec<f32>> {
        let out = self.output(self.offsets[self.offsets.len() - 1] as usize);
        let widen = |row: &[u16]| row.iter().map(|&bits| math::to_f32(Activation::Bf16, bits)).collect();
        out.chunks(self.n).map(widen).collect()
    }

    /// One element by the integer model, with a fold each `fold` k: the definition spelled out a second time.
    fn element(&self, expert: usize, row: usize, column: usize, fold: usize) -> u16 {
        let id = self.ids.as_ref().map_or(row as i32, |ids| ids[row]);
        let e4m3 = |code: u16| math::from_f32(Activation::Bf16, math::e4m3(code as u8));
        let a = |k: usize| match self.kind {
            _ if id < 0 || k >= self.k => 0,
            kind if is_w8a8(kind) => e4m3(self.a[id as usize * self.k + k]),
            _ => self.a[id as usize * self.k + k],
        };
        let b = |k: usize| match self.kind {
            _ if k >= self.k => 0,
            GemmKind::Bf16 => self.weights[expert].as_ref().unwrap()[column * self.k + k],
            _ => e4m3(self.weights[expert].as_ref().unwrap()[column * self.k + k]),
        };
        let groups = self.k.div_ceil(128);
        let (mut outer, mut inner) = (0f32, 0u32);
        let step = |k: [usize; 16], sum| mma::mma16(Activation::Bf16, &k.map(a), &k.map(b), sum);
        for k in (0..self.k).step_by(16) {
            if self.kind != GemmKind::W8a8Native {
                inner = step(std::array::from_fn(|i| k + i), inner);
            } else if k % 32 == 0 {
                let first = [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29].map(|i| k + i);
                let product = step(first.map(|k| k + 2), step(first, 0));
                inner = (f32::from_bits(inner) + f32::from_bits(product)).to_bits();
            }
            if (k + 16) % fold == 0 || k + 16 >= self.k {
                let b_scale = self.b_scale[expert][column / 128 * groups + k / 128];
                let sum = f32::from_bits(std::mem::take(&mut inner));
                outer = match self.kind {
                    GemmKind::Fp8 => outer + sum * b_scale,
                    GemmKind::Bf16 => sum,
                    _ if id < 0 => outer + sum * (0.0 * b_scale),
                    _ => outer + sum * (self.a_scale[id as usize * groups + k / 128] * b_scale),
                };
            }
        }
        let bias = self.bias.as_ref().map(|bias| bias[expert * self.n + column]);
        math::from_f32(Activation::Bf16, bias.map_or(outer, |bias| outer + bias))
    }
}

#[test]
fn f1_half_a_scale_block() {
    for kind in [GemmKind::W8a8, GemmKind::Fp8] {
        for (k, wanted) in [(320, 640.0), (192, 256.0), (80, 80.0)] {
            let mut problem = Problem::ones(kind, 128, k, &[0, 1]);
            problem.b_scale[0].copy_from_slice(&[1.0, 2.0, 4.0][..k.div_ceil(128)]);
            assert_eq!(problem.values(), [vec![wanted; 128]], "{kind:?} {k}");
        }
    }
}

#[test]
fn f4_columns_off_the_tile() {
    for kind in KINDS {
        for n in [1, 63, 65, 96] {
            let mut problem = Problem::ones(kind, n, 128, &[0, 5]);
            for (r, row) in problem.a.chunks_mut(128).enumerate() {
                let value = [1.0, 2.0, 3.0, 4.0, 5.0][r];
                row.fill(match kind {
                    kind if is_w8a8(kind) => u16::from(math::to_e4m3(value)),
                    _ => math::from_f32(Activation::Bf16, value),
                });
            }
            let wanted = (1..=5).map(|r| vec![128.0 * r as f32; n]).collect::<Vec<_>>();
            assert_eq!(problem.values(), wanted);
        }
    }
}

#[test]
fn f8_rows_off_the_tile() {
    let offsets = [0, 1, 64, 128, 193, 320, 449];
    let mut problem = Problem::ones(GemmKind::W8a8, 9, 384, &offsets);
    problem.a_scale = (0..449 * 3).map(|i| 2f32.powi((i / 3 + i % 3) % 4)).collect();
    for (r, row) in problem.values().iter().enumerate() {
        assert_eq!(*row, [[896.0, 1792.0, 1664.0, 1408.0][r % 4]; 9], "{r}");
    }
}

#[test]
fn j1_each_row_has_its_own_scales() {
    let mut problem = Problem::ones(GemmKind::W8a8, 256, 128, &[0, 256]);
    problem.a_scale[..128].fill(2.0);
    problem.a_scale[128..].fill(4.0);
    problem.b_scale[0] = vec![1.0, 2.0];
    let out = problem.values();
    for (row, column, wanted) in [(0, 0, 256.0), (128, 0, 512.0), (0, 128, 512.0), (128, 128, 1024.0)] {
        assert!(out[row..row + 128].iter().all(|row| row[column..column + 128] == [wanted; 128]));
    }
}

#[test]
fn j3_scales_and_weights_are_not_transposed() {
    for kind in [GemmKind::W8a8, GemmKind::Fp8] {
        let mut problem = Problem::ones(kind, 256, 256, &[0, 1]);
        problem.a[128..].fill(0);
        problem.b_scale[0] = vec![1.0, 2.0, 4.0, 8.0];
        assert_eq!(problem.values(), [[[128.0; 128], [512.0; 128]].concat()]);
        problem.weights[0].as_mut().unwrap()[128 * 256..].fill(0);
        assert_eq!(problem.values(), [[[128.0; 128], [0.0; 128]].concat()]);
    }
}

#[test]
fn j5_scales_advance_along_k() {
    let mut problem = Problem::ones(GemmKind::W8a8, 3, 512, &[0, 1]);
    problem.b_scale[0] = vec![1.0, 2.0, 4.0, 8.0];
    assert_eq!(problem.values(), [[1920.0; 3]]);
    problem.a_scale = vec![8.0, 4.0, 2.0, 1.0];
    assert_eq!(problem.values(), [[4096.0; 3]]);
    let mut problem = Problem::ones(GemmKind::Fp8, 3, 512, &[0, 1]);
    problem.b_scale[0] = vec![1.0, 2.0, 4.0, 8.0];
    assert_eq!(problem.values(), [[1920.0; 3]]);
}

#[test]
fn e3_empty_experts_among_full_ones() {
    for kind in KINDS {
        let mut problem = Problem::ones(kind, 128, 128, &[0, 0, 1, 1, 66, 66, 194, 194]);
        for (e, weights) in problem.weights.iter_mut().enumerate() {
            let value = (e + 1) as f32;
            let bits = match kind {
                GemmKind::Bf16 => math::from_f32(Activation::Bf16, value),
                _ => u16::from(math::to_e4m3(value)),
            };
            *weights = [1, 3, 5].contains(&e).then(|| vec![bits; 128 * 128]);
        }
        for (row, values) in problem.values().iter().enumerate() {
            let wanted = [256.0, 512.0, 768.0][usize::from(row >= 1) + usize::from(row >= 66)];
            assert_eq!(*values, [wanted; 128], "{row}");
        }
    }
}

#[test]
fn d6_rows_without_weights_are_left_alone() {
    for kind in KINDS {
        // Expert 1 is not resident, and rows 5 to 7 belong to nobody.
        let mut problem = Problem::ones(kind, 10, 32, &[0, 3, 4, 5]);
        problem.weights[1] = None;
        let one = 0x4200; // 32
        let wanted = [vec![one; 30], vec![0x5a5a; 10], vec![one; 10], vec![0x5a5a; 30]].concat();
        assert_eq!(problem.output(8), wanted, "{kind:?}");
        let rows = [7, 3, 4, 0, 4];
        let some = problem.with(|gemm| gemm.at(&rows, 2..5)).unwrap();
        assert_eq!(some, [vec![], vec![], vec![one; 3], vec![one; 3], vec![one; 3]]);
    }
}

/// Every element of random problems by the integer model; other folds are told apart.
#[test]
fn gemm_folds_where_it_is_defined_to() {
    for kind in KINDS {
        let fold = |kind| match kind {
            GemmKind::Fp8 => 128,
            GemmKind::W8a8 | GemmKind::W8a8Native => 64,
            GemmKind::Bf16 => 1 << 20,
        };
        for k in [1, 16, 40, 64, 80, 128, 200, 320, 512] {
            let mut problem = Problem::random(kind, 130, k, &[0, 4, 4, 9], k as u64);
            problem.ids = Some(vec![2, -1, 0, 8, 7, 7, 1, -1, 3]);
            // Without a bias, then with one that takes away what bf16 shows of rows 0 and 4.
            for bias in [false, true] {
                if bias {
                    let rows = [0, 2, 4].map(|row| problem.values()[row].clone());
                    problem.bias = Some(rows.concat().iter().map(|y| -y).collect());
                }
                let out = problem.output(9);
                let mut other = [0; 3];
                for (i, &given) in out.iter().enumerate() {
                    let (row, column) = (i / 130, i % 130);
                    let expert = if row < 4 { 0 } else { 2 };
                    assert_eq!(given, problem.element(expert, row, column, fold(kind)), "{kind:?} {k} {row} {column}");
                    for (count, fold) in other.iter_mut().zip([32, 64, 128]) {
                        *count += usize::from(given != problem.element(expert, row, column, fold));
                    }
                }
                if bias && kind != GemmKind::Bf16 && k == 512 {
                    let differs = other.map(|count| count > 0);
                    assert_eq!(differs, [true, !is_w8a8(kind), kind != GemmKind::Fp8], "{other:?}");
                }
                let sample = problem.with(|gemm| gemm.at(&[8, 2], 61..79)).unwrap();
                assert_eq!(sample, [out[8 * 130 + 61..][..18].to_vec(), out[2 * 130 + 61..][..18].to_vec()]);
            }
        }
    }
}

/// The instruction with e4m3 operands has an order of its own.
#[test]
fn native_e4m3_sums_are_other_sums() {
    let mut problem = Problem::random(GemmKind::W8a8, 1000, 1024, &[0, 1], 3);
    // Codes of all sizes: products that lose bits beside others.
    let mut random = Random(4);
    let mut code = || ((random.next() % 0x7f) | (random.next() & 0x80)) as u16;
    problem.a.fill_with(&mut code);
    problem.weights[0].as_mut().unwrap().fill_with(&mut code);
    problem.bias = Some(problem.values()[0].iter().map(|y| -y).collect());
    let chain = problem.output(1);
    problem.kind = GemmKind::W8a8Native;
    assert!(chain != problem.output(1));
}

/// By hand: two products of 2^-8, one after the other, are lost in a chain that holds 2^16. In a chain of their own they
/// make 2^-7, which is not.
#[test]
fn fold_of_64_against_128_by_hand() {
    for (kind, wanted) in [(GemmKind::W8a8, 2f32.powi(-7)), (GemmKind::Fp8, 0.0)] {
        let mut problem = Problem::ones(kind, 1, 144, &[0, 1]);
        problem.a.fill(0);
        let weights = problem.weights[0].as_mut().unwrap();
        for (k, a, w) in [(0, 256.0, 256.0), (64, 0.0625, 0.0625), (80, 0.0625, 0.0625), (128, -256.0, 256.0)] {
            problem.a[k] = match kind {
                GemmKind::W8a8 => u16::from(math::to_e4m3(a)),
                _ => math::from_f32(Activation::Bf16, a),
            };
            weights[k] = u16::from(math::to_e4m3(w));
        }
        assert_eq!(problem.values(), [[wanted]], "{kind:?}");
    }
}

#[test]
fn gemm_special_values() {
    for kind in KINDS {
        // A NaN code of a weight makes its column NaN, of A its row; 0·NaN too.
        let mut problem = Problem::ones(kind, 9, 48, &[0, 3]);
        let nans: &[u16] = if kind == GemmKind::Bf16 { &[0x7fc0, 0xffff] } else { &[0x7f, 0xff] };
        for &nan in nans {
            let mut problem = problem.clone();
            problem.weights[0].as_mut().unwrap()[4 * 48 + 47] = nan;
            problem.ids = Some(vec![0, -1, 2]);
            let out = problem.output(3);
            for (i, &bits) in out.iter().enumerate() {
                let wanted = if i % 9 == 4 { 0x7fff } else { [0x4240, 0, 0x4240][i / 9] };
                assert_eq!(bits, wanted, "{kind:?} {i}");
            }
        }
        problem.a[48] = if is_w8a8(kind) { 0xff } else { 0xff81 };
        let out = problem.output(3);
        assert_eq!(out, [[0x4240; 9], [0x7fff; 9], [0x4240; 9]].concat());
        // The values at k >= K of the next row are not read as this row's.
        let mut problem = Problem::ones(kind, 2, 24, &[0, 2]);
        problem.a[24..].fill(if is_w8a8(kind) { 0x7f } else { 0x7fc0 });
        let nan = problem.values();
        assert!(nan[0] == [24.0; 2] && nan[1].iter().all(|y| y.is_nan()));
        // A zero result is +0, unless a bias makes it otherwise.
        let mut problem = Problem::ones(kind, 2, 24, &[0, 1]);
        problem.a.fill(0);
        problem.b_scale[0].fill(-1.0);
        problem.bias = Some(vec![-0.0, -2.5]);
        assert_eq!(problem.output(1), bf16(&[0.0, -2.5]));
        assert_eq!(problem.output(1)[0], 0);
    }
}

#[test]
fn gemm_refuses_what_does_not_fit() {
    for kind in KINDS {
        let problem = Problem::ones(kind, 8, 16, &[0, 1, 2]);
        let fails = |change: &dyn Fn(&mut Problem)| {
            let mut problem = problem.clone();
            change(&mut problem);
            argument_of(problem.with(|gemm| gemm.run(&mut [0; 16])))
        };
        assert_eq!(fails(&|p| p.n = 0), "n");
        assert_eq!(fails(&|p| p.k = 0), "k");
        assert_eq!(fails(&|p| p.k = 17), "a");
        assert_eq!(fails(&|p| p.n = 9), "weights");
        assert_eq!(fails(&|p| p.offsets = vec![0, 1]), "expert_offsets");
        assert_eq!(fails(&|p| p.offsets = vec![0, 2, 1]), "expert_offsets");
        assert_eq!(fails(&|p| p.a.truncate(16)), if is_w8a8(kind) { "a_scale" } else { "a" });
        assert_eq!(fails(&|p| p.ids = Some(vec![0])), "sorted_token_ids");
        assert_eq!(fails(&|p| p.ids = Some(vec![0, 2])), "sorted_token_ids");
        assert_eq!(fails(&|p| p.bias = Some(vec![0.0; 15])), "bias");
        if kind != GemmKind::Bf16 {
            assert_eq!(fails(&|p| p.b_scale[1].push(1.0)), "weights");
        }
        assert_eq!(argument_of(problem.with(|gemm| gemm.run(&mut [0; 8]))), "out");
        assert_eq!(argument_of(problem.with(|gemm| gemm.run(&mut [0; 17]))), "out");
        assert_eq!(argument_of(problem.with(|gemm| gemm.at(&[0], 0..9))), "columns");
        let other = if is_w8a8(kind) { GemmKind::Bf16 } else { GemmKind::W8a8 };
        assert_eq!(argument_of(problem.with(|gemm| GroupedGemm { kind: other, ..*gemm }.check())), "a");
        let other = if kind == GemmKind::Bf16 { GemmKind::Fp8 } else { GemmKind::Bf16 };
        let name = if is_w8a8(kind) { "a" } else { "weights" };
        assert_eq!(argument_of(problem.with(|gemm| GroupedGemm { kind: other, ..*gemm }.check())), name);
    }
    // Nothing to do.
    assert!(Problem::ones(GemmKind::W8a8, 8, 16, &[0, 0, 0]).output(0).is_empty());
}

#[test]
fn gateup_silu_is_its_three_parts() {
    for kind in [GemmKind::W8a8, GemmKind::Fp8] {
        let offsets = [0, 3, 5, 6];
        let mut gate = Problem::random(kind, 200, 96, &offsets, 1);
        let mut up = Problem::random(kind, 200, 96, &offsets, 2);
        // Rows 3 and 4 have no up weights, row 5 no gate weights, and row 6 belongs to nobody.
        up.weights[1] = None;
        gate.weights[2] = None;
        let mut out = Quantized { codes: vec![0x5a; 7 * 200], scales: vec![-1.0; 7 * 2] };
        let run = |out: &mut Quantized| gate.with(|gate| up.with(|up| gateup_silu(gate, up, &SILU, out)));
        run(&mut out).unwrap();
        let parts = (gate.output(7), up.output(7));
        let wanted = silu_mul_quant_fp8(&parts.0[..600], &parts.1[..600], 3, 200, &SILU).unwrap();
        assert!(wanted.codes.iter().any(|&code| code != wanted.codes[0]));
        assert_eq!(out.codes, [wanted.codes, vec![0x5a; 800]].concat());
        assert_eq!(out.scales, [wanted.scales, vec![-1.0; 8]].concat());
        let mut short = Quantized { codes: vec![0; 5 * 200], scales: vec![0.0; 10] };
        assert_eq!(argument_of(run(&mut short)), "out_fp8");
        let mut short = Quantized { codes: vec![0; 6 * 200], scales: vec![0.0; 11] };
        assert_eq!(argument_of(run(&mut short)), "out_scale");
        up.offsets = vec![0, 2, 5, 6];
        let error = gate.with(|gate| up.with(|up| gateup_silu(gate, up, &SILU, &mut out)));
        assert_eq!(argument_of(error), "expert_offsets");
    }
    // By hand: gate 32, up 14: silu(32)·14 = 448, scale 1.
    let mut gate = Problem::ones(GemmKind::W8a8, 1, 16, &[0, 1]);
    let mut up = gate.clone();
    (gate.a_scale[0], up.a_scale[0]) = (2.0, 0.875);
    let mut out = Quantized { codes: vec![0], scales: vec![0.0] };
    gate.with(|gate| up.with(|up| gateup_silu(gate, up, &SILU, &mut out))).unwrap();
    assert_eq!(out, Quantized { codes: vec![0x7e], scales: vec![1.0] });
}
