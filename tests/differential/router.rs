//! The router's projections against the reference.

use crate::common::{any_emulator, argument_of, devices, gpu, scale};
use crate::topk::{GUARD, bits};
use half::bf16;
use megamoe::device::{Buffer, DeviceHandle, Emulator};
use megamoe::diff::Random;
use megamoe::ops::router::{RouterGemm, RouterGemmStrict, RouterTile, StrictTile};
use megamoe::reference;

/// bf16 bits: plain values, values over many powers of two, or anything at all.
pub fn values(random: &mut Random, len: usize, kind: usize) -> Vec<u16> {
    (0..len)
        .map(|_| match kind {
            0 => bf16::from_f32(random.in_range(-1.0, 1.0)).to_bits(),
            1 => bf16::from_f32(random.in_range(-1.0, 1.0) * 2f32.powi((random.next() % 60) as i32 - 30)).to_bits(),
            // Products below and above the range of f32, and few special values, which would else be in every row.
            2 => match random.next() % 512 {
                0 => [0x7FC0, 0x7F80, 0xFF80][random.next() as usize % 3],
                n => ((n % 200 + 7) << 7 | random.next() & 0x807F) as u16,
            },
            _ => random.next() as u16,
        })
        .collect()
}

#[track_caller]
fn run(
    device: &DeviceHandle,
    tile: Option<RouterTile>,
    (x, w, bias): (&[u16], &[u16], Option<&[f32]>),
    hidden: usize,
) -> Vec<u32> {
    let (tokens, experts) = (x.len() / hidden, w.len() / hidden);
    let op = RouterGemm::new(device, hidden, experts).unwrap();
    let bias = bias.map(|bias| Buffer::from_slice(device, bias).unwrap());
    let (x, w) = (Buffer::from_slice(device, x).unwrap(), Buffer::from_slice(device, w).unwrap());
    let logits = Buffer::from_slice(device, &vec![f32::from_bits(u32::MAX); tokens * experts + GUARD]).unwrap();
    op.launch_tile(tile.unwrap_or(op.choose(tokens)), &x, &w, bias.as_ref(), tokens, &logits).unwrap();
    let mut got = bits(&logits.download().unwrap());
    assert!(got.split_off(tokens * experts).iter().all(|&bits| bits == u32::MAX), "written behind the last logit");
    got
}

#[track_caller]
fn run_strict(device: &DeviceHandle, tile: Option<StrictTile>, x: &[u16], w: &[u16], hidden: usize) -> Vec<u16> {
    let (tokens, experts) = (x.len() / hidden, w.len() / hidden);
    let op = RouterGemmStrict::new(device, hidden, experts).unwrap();
    let (x, w) = (Buffer::from_slice(device, x).unwrap(), Buffer::from_slice(device, w).unwrap());
    let logits = Buffer::from_slice(device, &vec![0xA5A5u16; tokens * experts + GUARD]).unwrap();
    op.launch_tile(tile.unwrap_or(op.choose(tokens)), &x, &w, tokens, &logits).unwrap();
    let mut got = logits.download().unwrap();
    assert!(got.split_off(tokens * experts).iter().all(|&bits| bits == 0xA5A5), "written behind the last logit");
    got
}

/// First difference, if there is one.
fn difference<T: PartialEq + std::fmt::LowerHex>(wanted: &[T], got: &[T], experts: usize) -> Option<String> {
    if wanted.len() != got.len() {
        return Some(format!("{} logits, not {}", got.len(), wanted.len()));
    }
    let i = (0..wanted.len()).find(|&i| wanted[i] != got[i])?;
    Some(format!("token {}, expert {}: {:#x}, not {:#x}", i / experts, i % experts, got[i], wanted[i]))
}

/// Tokens, experts, hidden sizes: less than a tile, tails in every direction, rows of odd lengths.
const SHAPES: [(usize, usize, usize); 14] = [
    (1, 1, 1),
    (1, 3, 7),
    (2, 5, 31),
    (3, 9, 33),
    (5, 8, 100),
    (1, 33, 520),
    (4, 17, 528),
    (9, 60, 264),
    (33, 34, 136),
    (40, 16, 257),
    (32, 32, 128),
    (65, 7, 48),
    (2, 160, 1040),
    (1, 2, 5000),
];

#[test]
fn router_gemm_equals_the_reference() {
    let mut random = Random(21);
    for (number, (tokens, experts, hidden)) in SHAPES.into_iter().enumerate() {
        for kind in 0..4 {
            let (x, w) = (values(&mut random, tokens * hidden, kind), values(&mut random, experts * hidden, kind));
            let bias: Vec<f32> = (0..experts).map(|_| random.in_range(-1.0, 1.0)).collect();
            let bias = (kind % 2 == 1).then_some(&*bias);
            let wanted = bits(&reference::router_gemm(&x, &w, bias, hidden).unwrap());
            for (turn, tile) in RouterTile::ALL.into_iter().map(Some).chain([None]).enumerate() {
                for device in std::iter::once(any_emulator(number + kind + turn)).chain(gpu()) {
                    let got = run(&device, tile, (&x, &w, bias), hidden);
                    let difference = difference(&wanted, &got, experts);
                    assert_eq!(difference, None, "{tokens} x {experts} x {hidden}, {tile:?}, values {kind}");
                }
            }
        }
    }
}

#[test]
fn router_gemm_strict_equals_the_reference() {
    let mut random = Random(22);
    for (number, (tokens, experts, hidden)) in SHAPES.into_iter().enumerate() {
        for kind in 0..4 {
            let (x, w) = (values(&mut random, tokens * hidden, kind), values(&mut random, experts * hidden, kind));
            let wanted = reference::router_gemm_strict(&x, &w, hidden).unwrap();
            for (turn, tile) in StrictTile::ALL.into_iter().map(Some).chain([None]).enumerate() {
                for device in std::iter::once(any_emulator(number + kind + turn)).chain(gpu()) {
                    let got = run_strict(&device, tile, &x, &w, hidden);
                    let difference = difference(&wanted, &got, experts);
                    assert_eq!(difference, None, "{tokens} x {experts} x {hidden}, {tile:?}, values {kind}");
                }
            }
        }
    }
}

/// Sizes of models, on the GPU in full.
#[test]
fn sizes_of_models() {
    let mut random = Random(23);
    for (experts, hidden) in [(256, 7168), (128, 2048), (160, 5120), (32, 2880)] {
        for device in std::iter::once(any_emulator(experts)).chain(gpu()) {
            for tokens in [1, scale(&device, 5, 8), scale(&device, 0, 300), scale(&device, 0, 1029)] {
                let (experts, hidden) = (scale(&device, 40, experts), scale(&device, hidden / 4, hidden));
                let (x, w) = (values(&mut random, tokens * hidden, 0), values(&mut random, experts * hidden, 0));
                let wanted = bits(&reference::router_gemm(&x, &w, None, hidden).unwrap());
                let got = run(&device, None, (&x, &w, None), hidden);
                assert_eq!(difference(&wanted, &got, experts), None, "{tokens} x {experts} x {hidden}");
                let wanted = reference::router_gemm_strict(&x, &w, hidden).unwrap();
                let got = run_strict(&device, None, &x, &w, hidden);
                assert_eq!(difference(&wanted, &got, experts), None, "strict, {tokens} x {experts} x {hidden}");
            }
        }
    }
}

/// A case in which the two orders give different values.
#[test]
fn orders_of_sums() {
    let big = bf16::from_f32(2f32.powi(24)).to_bits();
    let mut x = [0u16; 64];
    (x[0], x[1], x[32]) = (big, big | 0x8000, 0x3F80);
    let w = [0x3F80u16; 64];
    for (_, device) in devices() {
        for tile in RouterTile::ALL {
            // Partial 0 loses the 1 before partial 1 takes the rest away.
            assert_eq!(run(&device, Some(tile), (&x, &w, None), 64), [0]);
        }
        for tile in StrictTile::ALL {
            assert_eq!(run_strict(&device, Some(tile), &x, &w, 64), [0x3F80]);
        }
    }
}

/// Where a product of two bf16 is outside f32's range it is rounded before it is added, by every tile.
#[test]
fn products_are_rounded_apart() {
    let power = |n: i32| bf16::from_f64(2f64.powi(n)).to_bits();
    let one = |at: usize, x: [u16; 2], w: [u16; 2]| {
        // Both are summands of one partial.
        let (mut xs, mut ws) = ([0u16; 200], [0u16; 200]);
        (xs[at], xs[at + 32], ws[at], ws[at + 32]) = (x[0], x[1], w[0], w[1]);
        (xs, ws)
    };
    let minus = |bits: u16| bits | 0x8000;
    for (x, w, wanted, fused) in [
        // 2^-149 + 2^-150, of which the second rounds to 0 by itself.
        ([power(-74), power(-75)], [power(-75), power(-75)], 1u32, 2u32),
        // -2^127 + 2^128.
        ([power(63), power(64)], [minus(power(64)), power(64)], 0x7F80_0000, 0x7F00_0000),
    ] {
        let value = |bits: u16| bf16::from_bits(bits).to_f32();
        let sum = value(x[1]).mul_add(value(w[1]), value(x[0]) * value(w[0]));
        assert_eq!(sum.to_bits(), fused, "an fma would be noticed");
        // Either half of a word, in the first chunk and behind it.
        for at in [2, 3, 140, 141] {
            let (x, w) = one(at, x, w);
            assert_eq!(bits(&reference::router_gemm(&x, &w, None, 200).unwrap()), [wanted]);
            for (_, device) in devices() {
                for tile in RouterTile::ALL {
                    for (x, w) in [(x, w), (w, x)] {
                        assert_eq!(run(&device, Some(tile), (&x, &w, None), 200), [wanted], "{tile:?}, k {at}");
                    }
                }
            }
        }
    }
    // All around the range in which an fma is taken: 2^-64 to 2^64.
    let mut random = Random(25);
    for turn in 0..8 {
        let (tokens, experts, hidden) = (34, 33, 264);
        let mut draw = |len| -> Vec<u16> {
            let field = |random: &mut Random| match (turn % 4, random.next() % 8) {
                (0, _) => 63 + random.next() % 128,
                (1, 0) => 60 + random.next() % 6,
                (2, 0) => 188 + random.next() % 6,
                (3, n) => [0, 62, 63, 126, 127, 128, 190, 191][n as usize],
                _ => 100 + random.next() % 50,
            };
            (0..len).map(|_| (field(&mut random) << 7 | random.next() & 0x807F) as u16).collect()
        };
        let (x, w) = (draw(tokens * hidden), draw(experts * hidden));
        let wanted = bits(&reference::router_gemm(&x, &w, None, hidden).unwrap());
        for device in std::iter::once(any_emulator(turn)).chain(gpu()) {
            let got = run(&device, Some(RouterTile::T32x32), (&x, &w, None), hidden);
            assert_eq!(difference(&wanted, &got, experts), None, "turn {turn}");
        }
    }
}

/// One NaN, one infinity: they stay in their rows. The products that fill a tile up do not make others of zeros.
#[test]
fn special_values_stay_in_their_rows() {
    let (tokens, experts, hidden) = (6, 5, 40);
    let mut x = vec![0x3F80u16; tokens * hidden];
    let w = vec![0x3F80u16; experts * hidden];
    (x[hidden + 39], x[3 * hidden]) = (0x7FC1, 0xFF80);
    for (_, device) in devices() {
        for tile in RouterTile::ALL {
            let got = run(&device, Some(tile), (&x, &w, None), hidden);
            for (token, row) in got.chunks(experts).enumerate() {
                let wanted = match token {
                    1 => 0x7FFF_FFFF,
                    3 => 0xFF80_0000,
                    _ => 40f32.to_bits(),
                };
                assert!(row.iter().all(|&bits| bits == wanted), "{tile:?}, token {token}");
            }
        }
    }
}

#[test]
fn f5_hidden_sizes_off_the_step() {
    for hidden in [16, 528, 1040, 100, 1] {
        let ones = vec![0x3F80u16; hidden];
        for (_, device) in devices() {
            for tile in RouterTile::ALL {
                assert_eq!(run(&device, Some(tile), (&ones, &ones, None), hidden), [(hidden as f32).to_bits()]);
            }
            for tile in StrictTile::ALL {
                let wanted = bf16::from_f32(hidden as f32).to_bits();
                assert_eq!(run_strict(&device, Some(tile), &ones, &ones, hidden), [wanted]);
            }
        }
    }
}

#[test]
fn arguments_are_checked() {
    let (device, other) = (Emulator::new(), Emulator::new());
    for (hidden, experts, name) in
        [(0, 4, "hidden"), (1 << 21, 4, "hidden"), (8, 0, "num_experts"), (8, 5000, "num_experts")]
    {
        assert_eq!(argument_of(&RouterGemm::new(&device, hidden, experts).unwrap_err()), name);
        assert_eq!(argument_of(&RouterGemmStrict::new(&device, hidden, experts).unwrap_err()), name);
    }
    let narrow = |device: &DeviceHandle, len| Buffer::from_slice(device, &vec![0u16; len]).unwrap();
    let wide = |device: &DeviceHandle, len| Buffer::from_slice(device, &vec![0f32; len]).unwrap();
    let (x, w, bias, logits) = (narrow(&device, 24), narrow(&device, 32), wide(&device, 4), wide(&device, 12));
    let op = RouterGemm::new(&device, 8, 4).unwrap();
    let refused =
        |x: &Buffer<u16>, w: &Buffer<u16>, bias: Option<&Buffer<f32>>, tokens: usize, logits: &Buffer<f32>| {
            argument_of(&op.launch(x, w, bias, tokens, logits).unwrap_err())
        };
    op.launch(&x, &w, Some(&bias), 3, &logits).unwrap();
    for x in [narrow(&device, 23), narrow(&other, 24)] {
        assert_eq!(refused(&x, &w, None, 3, &logits), "x");
    }
    for w in [narrow(&device, 31), narrow(&device, 33), narrow(&other, 32)] {
        assert_eq!(refused(&x, &w, None, 3, &logits), "w");
    }
    assert_eq!(refused(&x, &w, Some(&wide(&device, 3)), 3, &logits), "bias");
    assert_eq!(refused(&x, &w, None, 3, &wide(&device, 11)), "logits");
    assert_eq!(refused(&x, &w, None, 1 << 29, &logits), "tokens");
    op.launch(&narrow(&device, 0), &w, None, 0, &wide(&device, 0)).unwrap();

    let (op, logits) = (RouterGemmStrict::new(&device, 8, 4).unwrap(), narrow(&device, 12));
    let refused = |x: &Buffer<u16>, w: &Buffer<u16>, tokens: usize, logits: &Buffer<u16>| {
        argument_of(&op.launch(x, w, tokens, logits).unwrap_err())
    };
    op.launch(&x, &w, 3, &logits).unwrap();
    assert_eq!(refused(&narrow(&device, 23), &w, 3, &logits), "x");
    assert_eq!(refused(&x, &narrow(&device, 31), 3, &logits), "w");
    assert_eq!(refused(&x, &w, 3, &narrow(&other, 12)), "logits");
    assert_eq!(refused(&x, &w, 3, &narrow(&device, 11)), "logits");
    assert_eq!(refused(&x, &w, usize::MAX, &logits), "tokens");
    op.launch(&narrow(&device, 0), &w, 0, &narrow(&device, 0)).unwrap();
}

/// The comparison notices a last place, and the data an exchanged column.
#[test]
fn planted_faults_are_noticed() {
    let mut random = Random(24);
    let (x, mut w) = (values(&mut random, 3 * 80, 0), values(&mut random, 5 * 80, 0));
    let wanted = bits(&reference::router_gemm(&x, &w, None, 80).unwrap());
    let mut off = wanted.clone();
    off[7] ^= 1;
    assert!(difference(&wanted, &off, 5).unwrap().starts_with("token 1, expert 2"));
    assert!(difference(&wanted, &off[..14], 5).is_some());
    let device = Emulator::new();
    assert_eq!(difference(&wanted, &run(&device, None, (&x, &w, None), 80), 5), None);
    w.swap(400 - 1, 400 - 2);
    assert!(difference(&wanted, &run(&device, None, (&x, &w, None), 80), 5).unwrap().starts_with("token 0, expert 4"));
}
