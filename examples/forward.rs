//! A layer from random weights: quantise, upload, plan, forward. It runs on the emulator; with a GPU, `Gpu::new(0)?` takes its place.

use megamoe::device::{Buffer, Emulator};
use megamoe::diff::{Random, floats};
use megamoe::formats::{ExpertTensors, Fp4Experts, float16::bf16_from_f32, quantize::quantize_expert};
use megamoe::layer::{Hidden, Inputs, Layer};
use megamoe::workspace::Workspace;

fn main() -> megamoe::Result<()> {
    let (hidden, intermediate, experts, top_k, tokens) = (256, 128, 8, 2, 3);
    let mut random = Random(1);
    let mut bf16 = |n: usize| -> Vec<u16> { (0..n).map(|_| bf16_from_f32(random.in_range(-0.1, 0.1))).collect() };
    let mut expert = || {
        let [gate, up, down] = [(); 3].map(|()| bf16(intermediate * hidden));
        quantize_expert(&gate, &up, &down, hidden, intermediate)
    };
    let weights = (0..experts).map(|_| expert()).collect::<megamoe::Result<Vec<ExpertTensors<'_>>>>()?;

    let device = Emulator::new();
    let layer = Layer::new(&device, &Fp4Experts::pack(&weights)?, top_k, Default::default())?;
    let plan = layer.plan(tokens)?;
    let workspace = Workspace::new(&device, &plan)?;
    let x = Buffer::from_slice(&device, &vec![bf16_from_f32(1.0); tokens * hidden])?;
    let topk_ids = Buffer::from_slice(&device, &[0, 1, 2, 3, 7, -1])?; // -1: no expert
    let topk_weights = Buffer::from_slice(&device, &[0.5, 0.5, 0.75, 0.25, 1.0, 0.0])?;
    let out = Buffer::new(&device, tokens * hidden)?;

    let inputs = Inputs { tokens, x: Hidden::Bf16(&x), topk_ids: &topk_ids, topk_weights: &topk_weights };
    layer.forward(&plan, &workspace, inputs, &out)?;
    println!("{:?}", &floats(&out.download()?)[..8]);
    Ok(())
}
