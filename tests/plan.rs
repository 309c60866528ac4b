//! Plans against what was measured: the variant that a plan chooses is within 5 % of the best that was timed, for three shapes.

use megamoe::device::Properties;
use megamoe::plan::{Variant, choose_variant};
use megamoe::{LayerShape, Order};
use std::collections::BTreeMap;

/// Microseconds of every variant on an H200, one line a row of `megamoe bench decode --variants`.
const RECORDED: &str = include_str!("../testdata/h200_decode_variants.tsv");
/// How much slower than the best a choice may be.
const LIMIT: f64 = 1.05;

fn h200() -> Properties {
    Properties {
        name: "NVIDIA H200".into(),
        compute: (9, 0),
        multiprocessors: 132,
        shared_per_block: 227 << 10,
        shared_per_multiprocessor: 228 << 10,
    }
}

/// Shape by name and sizes, tokens and activation -> microseconds of each variant.
type Cells = BTreeMap<(String, [usize; 4], usize, String), BTreeMap<String, f64>>;

fn cells() -> Cells {
    let mut cells = Cells::new();
    for line in RECORDED.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let &[shape, hidden, intermediate, experts, top_k, tokens, activation, variant, us] = &fields[..] else {
            panic!("{line}");
        };
        let sizes = [hidden, intermediate, experts, top_k].map(|size| size.parse().unwrap());
        let cell = cells.entry((shape.into(), sizes, tokens.parse().unwrap(), activation.into())).or_default();
        assert!(cell.insert(variant.into(), us.parse().unwrap()).is_none(), "twice: {line}");
    }
    cells
}

/// The cells in which the choice is slower than the best by more than the limit.
fn misses(choose: impl Fn(&LayerShape, usize) -> Variant) -> Vec<String> {
    let mut misses = Vec::new();
    for ((name, sizes, tokens, activation), timed) in cells() {
        let [hidden, intermediate, experts, top_k] = sizes;
        let shape = LayerShape { hidden, intermediate, output: hidden, experts, top_k };
        let chosen = choose(&shape, tokens).name(Order::Decode);
        let best = timed.values().copied().fold(f64::INFINITY, f64::min);
        let us = timed.get(&chosen).unwrap_or_else(|| panic!("{chosen} was not timed: {name}, {tokens} tokens"));
        if *us > LIMIT * best {
            misses.push(format!("{name}, {tokens} tokens, {activation}: {chosen} {us:.1}, best {best:.1}"));
        }
    }
    misses
}

#[test]
fn the_choice_is_near_the_best_that_was_timed() {
    let cells = cells();
    assert!(cells.len() == 24 && cells.values().all(|timed| timed.len() >= 4), "{} cells", cells.len());
    let misses = misses(|shape, tokens| choose_variant(shape, tokens, &h200()));
    assert!(misses.is_empty(), "{}", misses.join("\n"));
}

#[test]
fn one_choice_for_all_is_found_out() {
    for variant in megamoe::plan::VARIANTS {
        assert!(!misses(|_, _| variant).is_empty(), "{variant:?}");
    }
}
