//! The CPU references of the operations around the grouped GEMMs, against values known beforehand.

use megamoe::diff::Random;
use megamoe::formats;
use megamoe::reference::mma::NAN;
use megamoe::reference::*;
use megamoe::{Activation, Error, Groups, Routing, Scoring};

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
