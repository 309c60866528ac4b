//! Inputs and outputs of a layer that another implementation has computed: a reference.safetensors.

use std::path::Path;

use safetensors::tensor::Dtype;

use super::store::TensorStore;
use crate::error::{Error, Result};

/// A reference run of one layer: T tokens, hidden size H, E experts, top-k K.
#[derive(Debug)]
pub struct Reference {
    store: TensorStore,
    /// The layer that it belongs to (`moe_layer_index`).
    pub layer: usize,
    /// Tokens T.
    pub tokens: usize,
    /// Hidden size H.
    pub hidden: usize,
    /// Experts per token K.
    pub top_k: usize,
    /// Input of the layer, bf16 bits [T, H].
    pub x: Vec<u16>,
    /// Chosen experts [T, K].
    pub topk_ids: Vec<i32>,
    /// Their weights [T, K], ready to be used.
    pub topk_weights: Vec<f32>,
    /// Output of the routed experts alone [T, H].
    pub routed_out: Vec<f32>,
    /// Output of the block, with its shared expert [T, H].
    pub out: Option<Vec<f32>>,
    /// Router logits [T, E].
    pub router_logits: Option<Vec<f32>>,
}

impl Reference {
    /// Reads a reference.safetensors, or the one in a folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join("reference.safetensors") } else { path.to_path_buf() };
        let store = TensorStore::open(&file)?;
        let index = store.metadata("moe_layer_index").unwrap_or("0");
        let layer = index.parse().map_err(|_| Error::Checkpoint {
            path: file.clone(),
            problem: format!("`moe_layer_index` is `{index}`, a layer number needed"),
        })?;
        let x = store.get("x")?;
        let [tokens, hidden] = x.dims(Dtype::BF16)?;
        let ids = store.get("topk_ids")?;
        let [id_rows, top_k] = ids.dims(Dtype::I32)?;
        if id_rows != tokens {
            return Err(ids.error(format!("{id_rows} rows for {tokens} rows of x")));
        }
        let floats = |name: &str, shape: &[usize]| {
            let tensor = store.get(name)?;
            tensor.expect(Dtype::F32, shape)?;
            tensor.f32()
        };
        let out = store.find("out_f32").map(|_| floats("out_f32", &[tokens, hidden])).transpose()?;
        let router_logits = match store.find("router_logits_f32") {
            Some(tensor) => {
                let [_, experts] = tensor.dims(Dtype::F32)?;
                Some(floats("router_logits_f32", &[tokens, experts])?)
            }
            None => None,
        };
        Ok(Self {
            layer,
            tokens,
            hidden,
            top_k,
            x: x.bf16()?,
            topk_ids: ids.i32()?,
            topk_weights: floats("topk_weights_f32", &[tokens, top_k])?,
            routed_out: floats("routed_out_f32", &[tokens, hidden])?,
            out,
            router_logits,
            store,
        })
    }

    /// All tensors of the file, for example the dequantised weights of expert 0.
    pub fn tensors(&self) -> &TensorStore {
        &self.store
    }
}
