//! How two outputs of one operation differ.

use super::op::Output;
use serde::Serialize;

/// The first element that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    /// Its index.
    pub index: usize,
    /// The index in words: token and column.
    pub place: String,
    /// Bits that were expected, hexadecimal.
    pub expected: String,
    /// Bits that came, hexadecimal.
    pub got: String,
    /// Value that was expected; null where JSON has no number for it.
    pub expected_value: f64,
    /// Value that came.
    pub got_value: f64,
}

/// Number of elements by distance in units in the last place: how many values of the type lie between, plus one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UlpHistogram {
    /// `buckets[0]` counts equal elements, `buckets[i]` those that are 2^(i-1) to 2^i - 1 apart.
    pub buckets: Vec<usize>,
    /// NaN on one side only.
    pub nan: usize,
}

/// What a comparison has found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Elements compared.
    pub elements: usize,
    /// Elements whose bits differ.
    pub different: usize,
    /// Elements that may not differ as much as they do: those whose bits differ, or, with a bound, those beyond it.
    pub wrong: usize,
    /// Whether a bound was used.
    pub bounded: bool,
    /// The first of the wrong elements.
    pub first: Option<Mismatch>,
    /// Status words differ.
    pub status_differs: bool,
    /// Distances in units in the last place.
    pub ulps: UlpHistogram,
    /// `magnitudes[i]`: elements whose absolute difference is in [2^(i+LOWEST), 2^(i+1+LOWEST)); the first and the last also hold
    /// what is below or above. Equal and NaN elements are in none.
    pub magnitudes: Vec<usize>,
    /// Largest absolute difference of finite values.
    pub max_abs: f64,
}

/// Power of two at which [`Comparison::magnitudes`] begins.
pub const LOWEST: i32 = -40;
const MAGNITUDES: usize = 64;

impl Comparison {
    /// Compares `got` with `expected`. With a bound (one for each element), bits may differ within it.
    pub fn of(expected: &Output, got: &Output, bound: Option<&[f32]>) -> Self {
        let element = expected.element;
        let mut out = Comparison {
            elements: expected.bits.len(),
            // A missing or surplus element is a wrong one.
            different: expected.bits.len().abs_diff(got.bits.len()),
            wrong: expected.bits.len().abs_diff(got.bits.len()),
            bounded: bound.is_some(),
            first: None,
            status_differs: expected.status != got.status,
            ulps: UlpHistogram { buckets: vec![0], nan: 0 },
            magnitudes: vec![0; MAGNITUDES],
            max_abs: 0.0,
        };
        for (index, (&a, &b)) in expected.bits.iter().zip(&got.bits).enumerate() {
            if a == b {
                out.ulps.buckets[0] += 1;
                continue;
            }
            out.different += 1;
            let difference = (element.value(a) - element.value(b)).abs();
            match (element.rank(a), element.rank(b)) {
                (Some(a), Some(b)) => out.ulps.count(a.abs_diff(b)),
                (None, None) => out.ulps.count(1),
                _ => out.ulps.nan += 1,
            }
            if difference.is_finite() {
                out.max_abs = out.max_abs.max(difference);
            }
            if difference > 0.0 {
                let power =
                    difference.log2().floor().clamp(f64::from(LOWEST), f64::from(LOWEST + MAGNITUDES as i32 - 1));
                out.magnitudes[(power as i32 - LOWEST) as usize] += 1;
            }
            let within = bound.and_then(|bound| bound.get(index)).is_some_and(|&bound| {
                let nans = element.value(a).is_nan() && element.value(b).is_nan();
                nans || bound == f32::INFINITY || difference <= f64::from(bound)
            });
            if within {
                continue;
            }
            out.wrong += 1;
            out.first.get_or_insert_with(|| {
                let digits = element.digits();
                let bits = |bits: u32| format!("0x{bits:0digits$x}");
                Mismatch {
                    index,
                    place: expected.place(index),
                    expected: bits(a),
                    got: bits(b),
                    expected_value: element.value(a),
                    got_value: element.value(b),
                }
            });
        }
        out
    }

    /// Takes in the comparison of another case. The first mismatch stays that of the earlier one.
    pub fn add(&mut self, other: &Comparison) {
        self.elements += other.elements;
        self.different += other.different;
        self.wrong += other.wrong;
        self.bounded |= other.bounded;
        self.first = self.first.take().or_else(|| other.first.clone());
        self.status_differs |= other.status_differs;
        let buckets = self.ulps.buckets.len().max(other.ulps.buckets.len());
        self.ulps.buckets.resize(buckets, 0);
        self.ulps.buckets.iter_mut().zip(&other.ulps.buckets).for_each(|(to, from)| *to += from);
        self.ulps.nan += other.ulps.nan;
        self.magnitudes.iter_mut().zip(&other.magnitudes).for_each(|(to, from)| *to += from);
        self.max_abs = self.max_abs.max(other.max_abs);
    }

    /// Nothing is wrong.
    pub fn agrees(&self) -> bool {
        self.wrong == 0 && !self.status_differs
    }
}

impl UlpHistogram {
    fn count(&mut self, ulps: u64) {
        // The two zeros are 0 apart and yet differ: they count as neighbours.
        let bucket = 64 - ulps.max(1).leading_zeros() as usize;
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
    }

    /// What a bucket holds, in words.
    pub fn label(bucket: usize) -> String {
        match bucket {
            0 => "0".into(),
            1 => "1".into(),
            2 => "2–3".into(),
            bucket => format!("2^{}…", bucket - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::op::Element;
    use super::*;
    use crate::reference::Status;

    fn output(element: Element, bits: &[u32]) -> Output {
        Output { element, columns: 2, bits: bits.to_vec(), status: Status::default() }
    }

    #[test]
    fn equal_outputs_agree() {
        let a = output(Element::Bf16, &[0x3f80, 0x7fff, 0x8000]);
        let comparison = Comparison::of(&a, &a, None);
        assert!(comparison.agrees() && comparison.first.is_none());
        assert_eq!(comparison.ulps.buckets, [3]);
    }

    #[test]
    fn every_kind_of_difference_is_found() {
        let a = output(Element::Bf16, &[0x3f80, 0x3f80, 0x0000, 0x7fff, 0x3f80]);
        let b = output(Element::Bf16, &[0x3f80, 0x3f83, 0x8000, 0x3f80, 0x7f80]);
        let comparison = Comparison::of(&a, &b, None);
        assert_eq!((comparison.different, comparison.wrong, comparison.ulps.nan), (4, 4, 1));
        assert_eq!(comparison.ulps.buckets[..3], [1, 1, 1]);
        assert_eq!(comparison.max_abs, 3.0 / 128.0);
        let first = comparison.first.unwrap();
        assert_eq!(
            (first.place.as_str(), first.expected.as_str(), first.got.as_str()),
            ("token 0, column 1", "0x3f80", "0x3f83")
        );
        let short = output(Element::Bf16, &[0x3f80]);
        assert!(!Comparison::of(&a, &short, None).agrees());
        let mut status = a.clone();
        status.status.bad_id = true;
        assert!(!Comparison::of(&a, &status, None).agrees());

        let mut sum = Comparison::of(&a, &a, None);
        sum.add(&Comparison::of(&a, &b, None));
        assert_eq!((sum.elements, sum.wrong, sum.ulps.buckets[0], sum.first.unwrap().index), (10, 4, 6, 1));
    }

    #[test]
    fn a_bound_allows_what_is_within_it() {
        let a = output(Element::F32, &[1f32.to_bits(), 1f32.to_bits(), f32::NAN.to_bits()]);
        let b = output(Element::F32, &[1.5f32.to_bits(), 1.25f32.to_bits(), 0x7fff_ffff]);
        let comparison = Comparison::of(&a, &b, Some(&[0.25, 0.25, 0.0]));
        assert_eq!((comparison.different, comparison.wrong), (3, 1));
        assert_eq!(comparison.first.unwrap().index, 0);
    }
}
