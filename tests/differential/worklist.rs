//! Work-lists of grouped GEMMs, against the reference, which builds them one item after the other.

use crate::common::{any_emulator, argument_of, devices, gpu, scale};
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::worklist::{Items, WorklistInputs, capacity, enqueue_with_blocks, prepare};
use megamoe::reference::{tile_worklist, tile_worklist_packed6, worklist_capacity};

const GUARD: u32 = 0x5A5A_5A5A;

/// A layer's rows.
#[derive(Clone, Debug)]
struct Rows {
    offsets: Vec<i32>,
    resident: Vec<bool>,
}

impl Rows {
    /// All experts resident.
    fn new(counts: &[usize]) -> Self {
        let mut offsets = vec![0];
        for &count in counts {
            offsets.push(offsets[offsets.len() - 1] + count as i32);
        }
        Rows { offsets, resident: vec![true; counts.len()] }
    }

    fn count(&self) -> usize {
        self.offsets[self.offsets.len() - 1] as usize
    }
}

/// The words of the list that the device makes. What is behind its end must stay as it is.
fn run(device: &DeviceHandle, items: Items, rows: &Rows, n_tiles: usize, m_tile: usize, blocks: u32) -> Vec<u32> {
    let experts = rows.resident.len();
    let capacity = capacity(rows.count(), experts, n_tiles, m_tile).unwrap();
    let list = Buffer::from_slice(device, &vec![GUARD; capacity * items.words() + 16]).unwrap();
    let total = Buffer::from_slice(device, &[GUARD; 2]).unwrap();
    let offsets = Buffer::from_slice(device, &rows.offsets).unwrap();
    // An expert that is not resident has a 0 in one of the tables.
    let table = |number: usize| {
        let entry = |e: usize| u64::from(rows.resident[e] || e % 2 != number);
        Buffer::from_slice(device, &(0..experts).map(entry).collect::<Vec<_>>()).unwrap()
    };
    let (gate, up) = (table(0), table(1));
    let both = rows.resident.contains(&false);
    let inputs = WorklistInputs {
        pairs: rows.count(),
        experts,
        expert_offsets: &offsets,
        gate: both.then(|| (&gate).into()),
        up: both.then(|| (&up).into()),
        n_tiles,
        m_tile,
    };
    prepare(device).unwrap();
    enqueue_with_blocks(device, items, inputs, &list, &total, blocks).unwrap();
    let [total, guard] = total.download().unwrap()[..] else { panic!() };
    assert_eq!(guard, GUARD);
    let mut list = list.download().unwrap();
    let words = if total == GUARD { 0 } else { total as usize * items.words() };
    assert!(list[words..].iter().all(|&word| word == GUARD), "written behind item {total}");
    list.truncate(words);
    list
}

/// What is different, if anything.
fn difference(wanted: &[u32], got: &[u32], words: usize) -> Option<String> {
    if wanted.len() != got.len() {
        return Some(format!("{} items, not {}", got.len() / words, wanted.len() / words));
    }
    let item = wanted.chunks(words).zip(got.chunks(words)).enumerate().find(|(_, (wanted, got))| wanted != got);
    item.map(|(i, (wanted, got))| format!("item {i} is {got:?}, not {wanted:?}"))
}

#[track_caller]
fn check(device: &DeviceHandle, rows: &Rows, n_tiles: usize, m_tile: usize, blocks: u32) {
    let (columns, tile) = (n_tiles as u32, m_tile as u32);
    let wide = tile_worklist(&rows.offsets, &rows.resident, columns, tile).unwrap().into_flattened();
    let got = run(device, Items::Wide, rows, n_tiles, m_tile, blocks);
    let name = &device.properties().name;
    assert_eq!(difference(&wide, &got, 4), None, "{name}, {n_tiles} x {m_tile}, {blocks} blocks");
    if n_tiles <= 64 {
        let packed = tile_worklist_packed6(&rows.offsets, &rows.resident, columns, tile).unwrap().into_flattened();
        let got = run(device, Items::Packed6, rows, n_tiles, m_tile, blocks);
        assert_eq!(difference(&packed, &got, 2), None, "packed, {name}, {n_tiles} x {m_tile}, {blocks} blocks");
    }
}

#[test]
fn as_written_by_hand() {
    let rows = Rows { resident: vec![true, true, false, true], ..Rows::new(&[3, 0, 2, 5]) };
    let wanted: [[u32; 4]; 8] = [
        [0, 0, 2, 0],
        [0, 0, 2, 1],
        [0, 2, 1, 0],
        [0, 2, 1, 1],
        [3, 5, 2, 0],
        [3, 5, 2, 1],
        [3, 7, 2, 0],
        [3, 7, 2, 1],
    ];
    let last = [[3, 9, 1, 0], [3, 9, 1, 1]];
    let wanted = [&wanted[..], &last[..]].concat().into_flattened();
    for (_, device) in devices() {
        let got = run(&device, Items::Wide, &rows, 2, 2, 3);
        assert_eq!(difference(&wanted, &got, 4), None);
        let packed = [0, 0, 0, 1, 0, 64, 0, 65, 3, 0, 3, 1, 3, 64, 3, 65, 3, 128, 3, 129];
        assert_eq!(difference(&packed, &run(&device, Items::Packed6, &rows, 2, 2, 1), 2), None);
        // Two items that changed places, and one that is missing, would be seen.
        let mut swapped = got.clone();
        for word in 0..4 {
            swapped.swap(word, 4 + word);
        }
        assert_eq!(difference(&wanted, &swapped, 4).unwrap(), "item 0 is [0, 0, 2, 1], not [0, 0, 2, 0]");
        assert_eq!(difference(&wanted, &got[..got.len() - 4], 4).unwrap(), "9 items, not 10");
    }
}

/// The parallel list is the serial one, on any grid.
#[test]
fn parallel_is_serial() {
    let mut random = Random(21);
    for (number, experts) in [1, 3, 60, 128, 256, 1500, 4096].into_iter().enumerate() {
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            let most = scale(&device, 12, 700) as u64;
            let counts: Vec<usize> = (0..experts)
                .map(|_| if random.next().is_multiple_of(3) { 0 } else { (random.next() % most) as usize })
                .collect();
            let mut rows = Rows::new(&counts);
            for (n_tiles, m_tile) in [(1, 1), (64, 4), (3, 16), (112, 64)] {
                let blocks = 1 + number as u32 * 3 % 8;
                check(&device, &rows, n_tiles, m_tile, blocks);
            }
            rows.resident = (0..experts).map(|e| e % 4 != 2).collect();
            check(&device, &rows, 2, 8, 1);
            check(&device, &rows, 2, 8, 132);
        }
    }
}

/// Case E3: empty experts among full ones.
#[test]
fn e3_empty_experts_among_full_ones() {
    for (_, device) in devices() {
        let mut rows = Rows::new(&[0, 1, 0, 65, 0, 128, 0]);
        check(&device, &rows, 2, 64, 2);
        // The empty ones need not be there.
        rows.resident = vec![false, true, false, true, false, true, false];
        check(&device, &rows, 2, 64, 2);
    }
}

/// The list can be as long as its capacity: one row an expert, and every row on one expert.
#[test]
fn e5_the_capacity_is_reached() {
    assert_eq!(capacity(5, 5, 3, 1), Some(30));
    for (pairs, experts, n_tiles, m_tile) in [(0, 4, 3, 64), (1, 4, 3, 64), (300, 256, 7, 64), (4096, 4096, 64, 128)] {
        let reference = worklist_capacity(pairs, experts, n_tiles as u32, m_tile);
        assert_eq!(capacity(pairs, experts, n_tiles, m_tile as usize), Some(reference));
    }
    for (_, device) in devices() {
        check(&device, &Rows::new(&[1; 40]), 3, 64, 2);
        let mut one = vec![0; 384];
        one[383] = scale(&device, 1000, 65_536);
        check(&device, &Rows::new(&one), 8, 64, 4);
        check(&device, &Rows::new(&[130, 1, 1, 65]), 5, 64, 1);
    }
}

/// Case G5: as many experts as threads, one fewer and one more.
#[test]
fn g5_experts_about_the_block_size() {
    for experts in [1023usize, 1024, 1025] {
        for device in std::iter::once(any_emulator(experts)).chain(gpu()) {
            let mut counts = vec![0; experts];
            counts[experts - 1] = 1;
            check(&device, &Rows::new(&counts), 2, 64, 1);
            counts[0] = 3;
            check(&device, &Rows::new(&counts), 2, 2, 2);
        }
    }
}

/// Case E1: nothing is launched, nothing is written.
#[test]
fn e1_zero_rows() {
    for (_, device) in devices() {
        assert!(run(&device, Items::Wide, &Rows::new(&[0, 0, 0]), 4, 64, 2).is_empty());
        check(&device, &Rows::new(&[1, 2]), 4, 64, 1);
    }
}

#[test]
fn m1_short_buffers_and_bad_sizes() {
    for (_, device) in devices() {
        let offsets = Buffer::from_slice(&device, &[0, 70, 100]).unwrap();
        let short_offsets = Buffer::from_slice(&device, &[0, 70]).unwrap();
        let short_table = Buffer::from_slice(&device, &[1u64]).unwrap();
        let words = capacity(100, 2, 3, 64).unwrap() * 4;
        let list = Buffer::<u32>::new(&device, words).unwrap();
        let short_list = Buffer::<u32>::new(&device, words - 1).unwrap();
        let (total, no_total) = (Buffer::<u32>::new(&device, 1).unwrap(), Buffer::<u32>::new(&device, 0).unwrap());
        let good = WorklistInputs {
            pairs: 100,
            experts: 2,
            expert_offsets: &offsets,
            gate: None,
            up: None,
            n_tiles: 3,
            m_tile: 64,
        };
        prepare(&device).unwrap();
        let enqueue = |items, inputs, list, total| enqueue_with_blocks(&device, items, inputs, list, total, 1);
        enqueue(Items::Wide, good, &list, &total).unwrap();
        let wrong = [
            ("expert_offsets", Items::Wide, WorklistInputs { expert_offsets: &short_offsets, ..good }, &list, &total),
            ("gate", Items::Wide, WorklistInputs { gate: Some((&short_table).into()), ..good }, &list, &total),
            ("up", Items::Wide, WorklistInputs { up: Some((&short_table).into()), ..good }, &list, &total),
            ("worklist", Items::Wide, good, &short_list, &total),
            ("total", Items::Wide, good, &list, &no_total),
            ("experts", Items::Wide, WorklistInputs { experts: 0, ..good }, &list, &total),
            ("experts", Items::Wide, WorklistInputs { experts: 4097, ..good }, &list, &total),
            ("pairs", Items::Wide, WorklistInputs { pairs: 1 << 31, ..good }, &list, &total),
            ("m_tile", Items::Wide, WorklistInputs { m_tile: 0, ..good }, &list, &total),
            ("n_tiles", Items::Wide, WorklistInputs { n_tiles: 0, ..good }, &list, &total),
            ("n_tiles", Items::Wide, WorklistInputs { n_tiles: 1 << 30, ..good }, &list, &total),
            ("n_tiles", Items::Packed6, WorklistInputs { n_tiles: 65, ..good }, &list, &total),
            ("n_tiles", Items::Packed6, WorklistInputs { pairs: (1 << 27) + 2, m_tile: 2, ..good }, &list, &total),
        ];
        for (name, items, inputs, list, total) in wrong {
            assert_eq!(argument_of(&enqueue(items, inputs, list, total).unwrap_err()), name);
        }
        check(&device, &Rows::new(&[1, 2]), 4, 64, 1);
    }
}
