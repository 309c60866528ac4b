//! The model of the tensor cores against results measured on an H200, and its fast form against the integers.

use std::ops::Range;

use megamoe::Activation;
use megamoe::reference::mma::{LANES, Operand, Row, Tile, chain_exact, chain_plain, mma, mma16};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const K16: &str = include_str!("../testdata/golden/hmma_m16n8k16_h200.tsv");
const K8_BF16: &str = include_str!("../testdata/golden/mma_m16n8k8_bf16_h200.tsv");
const K8_F16: &str = include_str!("../testdata/golden/mma_m16n8k8_f16_h200.tsv");

struct Case<const N: usize> {
    format: Activation,
    a: [u16; N],
    b: [u16; N],
    c: u32,
    d: u32,
}

fn cases<const N: usize>(text: &str) -> Vec<Case<N>> {
    let words = |field: &str| -> [u16; N] {
        let words = field.split(' ').map(|word| u16::from_str_radix(word, 16).unwrap()).collect::<Vec<_>>();
        words.try_into().unwrap()
    };
    let hex = |field: &str| u32::from_str_radix(field, 16).unwrap();
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let [format, _family, a, b, c, d] = line.split('\t').collect::<Vec<_>>().try_into().unwrap();
            let format = match format {
                "bf16" => Activation::Bf16,
                "f16" => Activation::F16,
                other => panic!("type {other}"),
            };
            Case { format, a: words(a), b: words(b), c: hex(c), d: hex(d) }
        })
        .collect()
}

fn mismatches<const N: usize>(
    cases: &[Case<N>],
    model: impl Fn(Activation, &[u16; N], &[u16; N], u32) -> u32,
) -> usize {
    cases.iter().filter(|case| model(case.format, &case.a, &case.b, case.c) != case.d).count()
}

/// The fast form of one instruction, in lane `lane` of a tile whose other lanes hold other values.
fn fast<const N: usize>(lane: usize, format: Activation, a: &[u16; N], b: &[u16; N], c: u32) -> u32 {
    let decode = |words: &[u16; N], k: usize| Operand::decode(format, words.get(k).copied().unwrap_or(0));
    let tile =
        Tile::new(
            format,
            1,
            |l, k| if l == lane { decode(a, k) } else { Operand::decode(format, (l * 77 + k) as u16) },
        );
    let row = Row::new(1, |k| decode(b, k));
    let mut acc: [f32; LANES] = std::array::from_fn(|l| if l == lane { f32::from_bits(c) } else { l as f32 });
    chain_exact(&tile, &row, 0..1, &mut acc);
    acc[lane].to_bits()
}

fn check_golden<const N: usize>(text: &str, lines: usize) {
    let cases = cases::<N>(text);
    assert_eq!(cases.len(), lines);
    assert_eq!(mismatches(&cases, mma), 0);
    for lane in 0..LANES {
        assert_eq!(mismatches(&cases, |f, a, b, c| fast(lane, f, a, b, c)), 0, "lane {lane}");
    }
}

#[test]
fn m16n8k16_gives_every_measured_result() {
    check_golden::<16>(K16, 197);
}

#[test]
fn m16n8k8_gives_every_measured_result() {
    check_golden::<8>(K8_BF16, 36);
    check_golden::<8>(K8_F16, 36);
}

/// The measured lines tell wrong models apart; otherwise agreeing with them would mean little.
#[test]
fn wrong_models_do_not_give_the_measured_results() {
    let mut cases = cases::<16>(K16);
    let plain = |format, a: &[u16; 16], b: &[u16; 16], c| {
        let value = |bits| f64::from(Operand::decode(format, bits).value);
        let sum = a.iter().zip(b).fold(f64::from(f32::from_bits(c)), |sum, (&a, &b)| sum + value(a) * value(b));
        (sum as f32).to_bits()
    };
    assert!(mismatches(&cases, plain) > 50);
    let two_halves = |format, a: &[u16; 16], b: &[u16; 16], c| {
        let half = |words: &[u16; 16], first: usize| -> [u16; 8] { words[first..first + 8].try_into().unwrap() };
        mma(format, &half(a, 8), &half(b, 8), mma(format, &half(a, 0), &half(b, 0), c))
    };
    assert!(mismatches(&cases, two_halves) > 20);
    cases[100].d ^= 1;
    assert_eq!(mismatches(&cases, mma16), 1);
}

/// Bits of an f32 in `format`, truncated: close enough to aim at a magnitude.
fn near(format: Activation, x: f32) -> u16 {
    megamoe::reference::math::from_f32(format, x)
}

/// What a family's operands look like.
#[derive(Clone, Copy, Debug)]
enum Family {
    AnyBits,
    Finite,
    NarrowExponents,
    Sparse,
    AllZero,
    Subnormal,
    Cancelling,
    OneHuge,
}

/// What c looks like.
#[derive(Clone, Copy, Debug)]
enum Addend {
    AnyBits,
    Zero,
    NearMax,
    Subnormal,
    Moderate,
    MinusFirstLane,
    /// Just below a power of two, of any size: the hardest to truncate.
    AllOnes,
}

/// A reproducible stream of words (splitmix64).
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn operand(&mut self, format: Activation, family: Family, k: usize) -> u16 {
        let sign = (self.next() as u16) & 0x8000;
        let mantissa_bits = if format == Activation::Bf16 { 7 } else { 10 };
        match family {
            Family::AnyBits => self.next() as u16,
            Family::Finite => {
                let bits = self.next() as u16;
                if Operand::decode(format, bits).value.is_finite() { bits } else { bits & 0x83ff }
            }
            Family::NarrowExponents => near(format, self.unit()),
            Family::Sparse => {
                if self.next().is_multiple_of(5) {
                    near(format, self.unit() * 100.0)
                } else {
                    sign
                }
            }
            Family::AllZero => sign,
            Family::Subnormal => sign | (self.next() as u16 & ((2 << mantissa_bits) - 1)),
            // Equal pairs: with the other operand's signs alternating their products cancel.
            Family::Cancelling => near(format, ((k / 2 + 3) as f32) * if k.is_multiple_of(2) { 1.0 } else { -1.0 }),
            Family::OneHuge if k == 7 => near(format, 3e4),
            Family::OneHuge => near(format, self.unit() * 1e-3),
        }
    }

    fn addend(&mut self, kind: Addend) -> u32 {
        match kind {
            Addend::AnyBits => self.next() as u32,
            Addend::Zero => (self.next() as u32) & 0x8000_0000,
            Addend::NearMax => (self.next() as u32 & 0x8000_00ff) | 0x7f7f_ff00,
            Addend::Subnormal => self.next() as u32 & 0x80ff_ffff,
            Addend::AllOnes => {
                let exponent = 80 + self.next() as u32 % 80;
                (self.next() as u32 & 0x8000_0000) | exponent << 23 | (0x7f_ffff - (self.next() as u32 % 4))
            }
            Addend::Moderate | Addend::MinusFirstLane => (self.unit() * 50.0).to_bits(),
        }
    }
}

/// One comparison of a chained form with the integers.
#[derive(Clone, Copy, Debug)]
struct Comparison {
    format: Activation,
    a: Family,
    b: Family,
    addend: Addend,
    first: usize,
    count: usize,
    seed: u64,
}

impl Comparison {
    /// The accumulators of all lanes after the chain: by the integers, and by `form`.
    fn run(self, form: impl Fn(&Tile, &Row, Range<usize>, &mut [f32; LANES])) -> ([u32; LANES], [u32; LANES]) {
        let Comparison { format, addend, first, count, .. } = self;
        let mut stream = Stream(self.seed);
        let steps = first..first + count;
        let len = steps.end * 16;
        let a: Vec<[u16; LANES]> =
            (0..len).map(|k| std::array::from_fn(|_| stream.operand(format, self.a, k))).collect();
        let b: Vec<u16> = (0..len).map(|k| stream.operand(format, self.b, k)).collect();
        let mut acc: [f32; LANES] = std::array::from_fn(|_| f32::from_bits(stream.addend(addend)));
        let expected = |lane: usize, from: f32| {
            steps.clone().fold(from.to_bits(), |c, step| {
                let a: [u16; 16] = std::array::from_fn(|k| a[step * 16 + k][lane]);
                let b: [u16; 16] = std::array::from_fn(|k| b[step * 16 + k]);
                mma16(format, &a, &b, c)
            })
        };
        if let Addend::MinusFirstLane = addend {
            acc = [-f32::from_bits(expected(0, 0.0)); LANES];
        }
        let wanted: [u32; LANES] = std::array::from_fn(|lane| expected(lane, acc[lane]));
        let tile = Tile::new(format, steps.end, |lane, k| Operand::decode(format, a[k][lane]));
        let row = Row::new(steps.end, |k| Operand::decode(format, b[k]));
        form(&tile, &row, steps, &mut acc);
        (wanted, acc.map(f32::to_bits))
    }
}

fn comparison() -> impl Strategy<Value = Comparison> {
    (any::<bool>(), family(), family(), addend(), 0usize..3, 0usize..3, any::<u64>()).prop_map(
        |(f16, a, b, addend, first, count, seed)| {
            let format = if f16 { Activation::F16 } else { Activation::Bf16 };
            Comparison { format, a, b, addend, first, count, seed }
        },
    )
}

fn family() -> impl Strategy<Value = Family> {
    use Family::*;
    prop::sample::select(vec![AnyBits, Finite, NarrowExponents, Sparse, AllZero, Subnormal, Cancelling, OneHuge])
}

fn addend() -> impl Strategy<Value = Addend> {
    use Addend::*;
    prop::sample::select(vec![AnyBits, Zero, NearMax, Subnormal, Moderate, MinusFirstLane, AllOnes])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fast_form_equals_integers(comparison in comparison()) {
        let (wanted, got) = comparison.run(chain_exact);
        prop_assert_eq!(got, wanted);
    }
}

/// Forms that are wrong in one respect must be caught by the very same comparisons.
#[test]
fn the_comparison_catches_wrong_forms() {
    type Form = fn(&Tile, &Row, Range<usize>, &mut [f32; LANES]);
    let forms: [(&str, Form); 4] = [
        ("rounded to nearest from f64", |tile, row, steps, acc| {
            let sums = chain_plain(tile, row, steps);
            *acc = std::array::from_fn(|lane| (sums[lane] + f64::from(acc[lane])) as f32);
        }),
        ("subnormal results flushed", |tile, row, steps, acc| {
            chain_exact(tile, row, steps, acc);
            *acc = acc.map(|c| if c.is_subnormal() { 0.0 } else { c });
        }),
        ("zeros keep c's sign", |tile, row, steps, acc| {
            let before = *acc;
            chain_exact(tile, row, steps, acc);
            *acc =
                std::array::from_fn(|lane| if acc[lane] == 0.0 { acc[lane].copysign(before[lane]) } else { acc[lane] });
        }),
        ("overflow saturates", |tile, row, steps, acc| {
            let finite = acc.iter().all(|c| c.is_finite());
            chain_exact(tile, row, steps, acc);
            *acc = acc.map(|c| if finite && c == f32::INFINITY { f32::MAX } else { c });
        }),
    ];
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let comparisons = (0..4000).map(|_| comparison().new_tree(&mut runner).unwrap().current()).collect::<Vec<_>>();
    for (name, form) in forms {
        let caught = comparisons.iter().filter(|comparison| {
            let (wanted, got) = comparison.run(form);
            got != wanted
        });
        assert!(caught.count() > 10, "{name}");
    }
}

/// Every pair of bf16 classes at the edges: largest, smallest, subnormal and zero operands against every kind of c.
#[test]
fn fast_form_equals_integers_at_the_edges() {
    let edges: [u16; 12] = [0, 1, 0x7f, 0x80, 0x3ff, 0x400, 0x3c00, 0x3f80, 0x7bff, 0x7c00, 0x7f7f, 0x7f80];
    let addends = [0, 1, 0x7f_ffff, 0x80_0000, 0x3f80_0000, 0x7f7f_ffff, 0x7f80_0000, 0x7fc0_0000u32];
    for format in [Activation::Bf16, Activation::F16] {
        for (x, y) in edges.iter().flat_map(|&x| edges.iter().map(move |&y| (x, y))) {
            for signs in 0..8u16 {
                let mut a = [0; 16];
                let mut b = [0; 16];
                (a[3], b[3]) = (x | signs << 15, y);
                (a[12], b[12]) = (x, (signs >> 1) << 15 | y);
                for c in addends.map(|c| c | u32::from(signs >> 2) << 31) {
                    let (wanted, got) = (mma16(format, &a, &b, c), fast(5, format, &a, &b, c));
                    assert_eq!(got, wanted, "{format:?} {x:04x} {y:04x} signs {signs} c {c:08x}");
                }
            }
        }
    }
}
