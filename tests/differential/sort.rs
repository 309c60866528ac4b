//! Rows by expert, against the reference.

use crate::common::{any_emulator, argument_of, devices, gpu, scale};
use kernels_gpu::status::BAD_EXPERT_ID;
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::sort::{SortInputs, SortOutputs, SortPlan};
use megamoe::reference::{Sorted, sort_by_expert};

/// Buffers of one sort, each with 16 elements behind its end that must stay as they are.
struct Buffers {
    ids: Buffer<i32>,
    offsets: Buffer<i32>,
    tokens: Buffer<i32>,
    pairs: Buffer<i32>,
    perm: Buffer<i32>,
    status: Buffer<u32>,
}

const GUARD: i32 = 0x5A5A_5A5A;
const GUARDS: usize = 16;

impl Buffers {
    fn new(device: &DeviceHandle, ids: &[i32], experts: usize) -> Self {
        let guarded = |len: usize| Buffer::from_slice(device, &vec![GUARD; len + GUARDS]).unwrap();
        Buffers {
            ids: Buffer::from_slice(device, ids).unwrap(),
            offsets: guarded(experts + 1),
            tokens: guarded(ids.len()),
            pairs: guarded(ids.len()),
            perm: guarded(ids.len()),
            status: Buffer::from_slice(device, &[0]).unwrap(),
        }
    }

    fn outputs(&self) -> SortOutputs<'_> {
        SortOutputs {
            expert_offsets: &self.offsets,
            sorted_token_ids: &self.tokens,
            sorted_pairs: &self.pairs,
            token_to_perm: &self.perm,
            status: &self.status,
        }
    }

    fn result(&self) -> Sorted {
        let unguarded = |buffer: &Buffer<i32>| {
            let mut all = buffer.download().unwrap();
            let guards = all.split_off(all.len() - GUARDS);
            assert!(guards.iter().all(|&word| word == GUARD), "written behind the end");
            all
        };
        Sorted {
            expert_offsets: unguarded(&self.offsets),
            sorted_token_ids: unguarded(&self.tokens),
            sorted_pairs: unguarded(&self.pairs),
            token_to_perm: unguarded(&self.perm),
            bad_expert_id: self.status.download().unwrap()[0] == BAD_EXPERT_ID,
        }
    }
}

/// Sorts on `device` with tables that make `resident` true: of each expert that is not, one of the three entries is 0.
fn run(device: &DeviceHandle, ids: &[i32], top_k: usize, resident: &[bool], blocks: Option<usize>) -> Sorted {
    let tokens = ids.len() / top_k;
    let plan = match blocks {
        Some(blocks) => SortPlan::with_blocks(device, tokens, top_k, resident.len(), blocks),
        None => SortPlan::new(device, tokens, top_k, resident.len()),
    }
    .unwrap();
    let buffers = Buffers::new(device, ids, resident.len());
    let tables: Vec<Buffer<u64>> = (0..3)
        .map(|table| {
            let entry = |e: usize| if resident[e] || e % 3 != table { 0x1000 + e as u64 } else { 0 };
            Buffer::from_slice(device, &(0..resident.len()).map(entry).collect::<Vec<_>>()).unwrap()
        })
        .collect();
    // Without absent experts, tables may be absent too.
    let given = |table: usize| (resident.contains(&false) || table == 0).then(|| (&tables[table]).into());
    let inputs = SortInputs { tokens, ids: &buffers.ids, gate: given(0), up: given(1), down: given(2) };
    plan.enqueue(inputs, buffers.outputs()).unwrap();
    buffers.result()
}

/// What is different, if anything.
fn difference(wanted: &Sorted, got: &Sorted) -> Option<String> {
    let lists = [
        ("expert_offsets", &wanted.expert_offsets, &got.expert_offsets),
        ("sorted_token_ids", &wanted.sorted_token_ids, &got.sorted_token_ids),
        ("sorted_pairs", &wanted.sorted_pairs, &got.sorted_pairs),
        ("token_to_perm", &wanted.token_to_perm, &got.token_to_perm),
    ];
    for (name, wanted, got) in lists {
        if wanted.len() != got.len() {
            return Some(format!("{name}: {} elements, not {}", got.len(), wanted.len()));
        }
        if let Some(i) = (0..wanted.len()).find(|&i| wanted[i] != got[i]) {
            return Some(format!("{name}[{i}] is {}, not {}", got[i], wanted[i]));
        }
    }
    (wanted.bad_expert_id != got.bad_expert_id).then(|| format!("bad_expert_id {}", got.bad_expert_id))
}

#[track_caller]
fn check(device: &DeviceHandle, ids: &[i32], top_k: usize, resident: &[bool], blocks: Option<usize>) {
    let wanted = sort_by_expert(ids, top_k, resident).unwrap();
    let got = run(device, ids, top_k, resident, blocks);
    if let Some(difference) = difference(&wanted, &got) {
        let what = format!("{} pairs, top_k {top_k}, {} experts", ids.len(), resident.len());
        panic!("{}, {what}, {blocks:?} blocks: {difference}", device.properties().name);
    }
}

/// Ids from `low` on, `range` of them.
fn ids(random: &mut Random, count: usize, low: i32, range: u64) -> Vec<i32> {
    (0..count).map(|_| low + (random.next() % range) as i32).collect()
}

#[test]
fn sorts_every_size() {
    let mut random = Random(11);
    for (number, (tokens, top_k, experts)) in [
        (1, 1, 1),
        (1, 8, 4),
        (3, 2, 7),
        (4, 8, 32),
        (33, 1, 33),
        (64, 8, 128),
        (129, 6, 60),
        (300, 8, 256),
        (341, 3, 1025),
        (17, 32, 4096),
    ]
    .into_iter()
    .enumerate()
    {
        let ids = ids(&mut random, tokens * top_k, -2, experts as u64 + 4);
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            check(&device, &ids, top_k, &vec![true; experts], None);
            let resident: Vec<bool> = (0..experts).map(|e| (e * 7 + number) % 3 != 0).collect();
            check(&device, &ids, top_k, &resident, None);
        }
    }
}

/// Several chunks, and as many as there are: nothing depends on the division.
#[test]
fn any_number_of_blocks() {
    let mut random = Random(12);
    for (number, experts) in [8, 250, 1500].into_iter().enumerate() {
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            let tokens = scale(&device, 1400, 8192);
            let top_k = scale(&device, 3, 8);
            let ids = ids(&mut random, tokens * top_k, -1, experts as u64 + 2);
            let resident: Vec<bool> = (0..experts).map(|e| e % 5 != 1).collect();
            for blocks in [1, 2, 3, 5, 64, 132] {
                check(&device, &ids, top_k, &resident, Some(blocks));
            }
        }
    }
}

/// Everything on the first, the last, or on an expert that is not resident.
#[test]
fn e5_all_tokens_on_one_expert() {
    for (number, device) in std::iter::once(any_emulator(4)).chain(gpu()).enumerate() {
        let tokens = scale(&device, 640, 8192);
        for expert in [0, 200, 383] {
            let ids = vec![expert; tokens * 8];
            let mut resident = vec![true; 384];
            check(&device, &ids, 8, &resident, None);
            resident[expert as usize] = false;
            check(&device, &ids, 8, &resident, Some(3 + number));
        }
    }
}

/// Pairs of an expert stay in their order: a sort that is not stable would be seen.
#[test]
fn pairs_keep_their_order() {
    let sorted = sort_by_expert(&[1, 0, 1, 1], 2, &[true, true]).unwrap();
    assert_eq!(sorted.sorted_pairs, [1, 0, 2, 3]);
    for (_, device) in devices() {
        let got = run(&device, &[1, 0, 1, 1], 2, &[true, true], None);
        assert_eq!(difference(&sorted, &got), None);
        let mut unstable = got;
        unstable.sorted_pairs = vec![1, 2, 0, 3];
        assert_eq!(difference(&sorted, &unstable).unwrap(), "sorted_pairs[1] is 2, not 0");
    }
}

/// Ids of every kind. Only an id >= E sets the status.
#[test]
fn d1_ids_outside_are_skipped() {
    for (_, device) in devices() {
        let odd = [0, -1, 3, i32::MIN, 2, i32::MAX, 1, 4];
        check(&device, &odd, 2, &[true; 4], None);
        assert!(run(&device, &odd, 2, &[true; 4], None).bad_expert_id);
        let got = run(&device, &[-1, -7, i32::MIN, 0], 2, &[true; 4], None);
        assert!(!got.bad_expert_id);
        assert_eq!(got.expert_offsets, [0, 1, 1, 1, 1]);
        assert_eq!(got.token_to_perm, [-1, -1, -1, 0]);
    }
}

/// Case G5: as many experts as threads, one fewer and one more, a token on the last.
#[test]
fn g5_experts_about_the_block_size() {
    for experts in [1023usize, 1024, 1025] {
        for device in std::iter::once(any_emulator(experts)).chain(gpu()) {
            let last = experts as i32 - 1;
            check(&device, &[last], 1, &vec![true; experts], None);
            let got = run(&device, &[last, 0], 1, &vec![true; experts], None);
            assert_eq!(got.token_to_perm, [1, 0]);
            assert_eq!(got.expert_offsets[experts], 2);
        }
    }
}

/// Case E1: nothing is launched, nothing is written.
#[test]
fn e1_zero_tokens() {
    for (_, device) in devices() {
        let got = run(&device, &[], 2, &[true; 3], None);
        assert_eq!(got.expert_offsets, [GUARD; 4]);
        check(&device, &[2, 0], 2, &[true; 3], None);
    }
}

#[test]
fn m1_short_buffers_and_bad_sizes() {
    for (_, device) in devices() {
        let long = |len: usize| Buffer::<i32>::from_slice(&device, &vec![0; len]).unwrap();
        let (pairs, experts) = (6, 3);
        let buffers = Buffers::new(&device, &[0; 6], experts);
        let table = Buffer::<u64>::from_slice(&device, &[1; 3]).unwrap();
        let short_table = Buffer::<u64>::from_slice(&device, &[1; 2]).unwrap();
        let no_status = Buffer::<u32>::new(&device, 0).unwrap();
        let plan = SortPlan::new(&device, 3, 2, experts).unwrap();
        let inputs = SortInputs { tokens: 3, ids: &buffers.ids, gate: Some((&table).into()), up: None, down: None };
        let outputs = buffers.outputs();
        plan.enqueue(inputs, outputs).unwrap();

        let (ids, offsets, list) = (long(pairs - 1), long(experts), long(pairs - 1));
        let wrong = [
            ("ids", SortInputs { ids: &ids, ..inputs }, outputs),
            ("gate", SortInputs { gate: Some((&short_table).into()), ..inputs }, outputs),
            ("up", SortInputs { up: Some((&short_table).into()), ..inputs }, outputs),
            ("down", SortInputs { down: Some((&short_table).into()), ..inputs }, outputs),
            ("tokens", SortInputs { tokens: 4, ..inputs }, outputs),
            ("expert_offsets", inputs, SortOutputs { expert_offsets: &offsets, ..outputs }),
            ("sorted_token_ids", inputs, SortOutputs { sorted_token_ids: &list, ..outputs }),
            ("sorted_pairs", inputs, SortOutputs { sorted_pairs: &list, ..outputs }),
            ("token_to_perm", inputs, SortOutputs { token_to_perm: &list, ..outputs }),
            ("status", inputs, SortOutputs { status: &no_status, ..outputs }),
        ];
        for (name, inputs, outputs) in wrong {
            assert_eq!(argument_of(&plan.enqueue(inputs, outputs).unwrap_err()), name);
        }
        for (name, max_tokens, top_k, experts) in [
            ("experts", 1, 1, 0),
            ("experts", 1, 1, 4097),
            ("top_k", 1, 0, 1),
            ("top_k", 1, 33, 1),
            ("max_tokens", 1 << 30, 2, 1),
        ] {
            assert_eq!(argument_of(&SortPlan::new(&device, max_tokens, top_k, experts).unwrap_err()), name);
        }
        // The device still works.
        check(&device, &[2, 0], 2, &[true; 3], None);
        // One block needs no counts; more have a row of them each.
        assert_eq!(plan.workspace_bytes(), 0);
        let large = SortPlan::with_blocks(&device, 5000, 2, experts, 7).unwrap();
        assert_eq!(large.workspace_bytes(), 7 * experts * 4);
    }
}
