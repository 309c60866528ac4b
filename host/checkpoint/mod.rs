//! Checkpoints as other tools write them: safetensors files beside a config.json.
//!
//! Files are memory-mapped and nothing that a file claims is believed before it was checked against the file's size.
//! What a tensor holds is decided by its own name, dtype and shape, because one file mixes formats: quantised experts
//! lie beside plain shared experts and routers.

mod config;
mod dense;
mod experts;
mod inspect;
mod moe;
mod reference;
mod store;

pub use config::{ModelConfig, Quantization, Scoring};
pub use experts::{ExpertLayout, MoeBlock};
pub use inspect::{ExpertFormat, Inspect, LayerInfo, MoeInfo};
pub use moe::{Experts, MoeWeights, SharedWeights};
pub use reference::Reference;
pub use store::{Tensor, TensorStore};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::formats::{ExpertTensors, Fp4Experts};
use crate::types::LayerShape;

/// A model on disk: its configuration, its tensors, and where its experts are.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    store: TensorStore,
    blocks: BTreeMap<usize, MoeBlock>,
}

impl Checkpoint {
    /// Opens a folder with config.json and either model.safetensors or shards with model.safetensors.index.json.
    ///
    /// The files stay memory-mapped: whoever changes them while the checkpoint is open changes what is read, and
    /// whoever shortens them ends the process.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let config = ModelConfig::open(&path.join("config.json"))?;
        let store = TensorStore::open(&path)?;
        let blocks = experts::find_blocks(&store)?;
        Ok(Self { path, config, store, blocks })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What config.json says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// All tensors, for example the router's.
    pub fn tensors(&self) -> &TensorStore {
        &self.store
    }

    /// Layers with routed experts, ascending, found by the tensors.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        self.blocks.keys().copied()
    }

    /// The first layer with routed experts.
    pub fn default_layer(&self) -> Result<usize> {
        self.moe_layers().next().ok_or_else(|| self.no_experts("mlp.experts or block_sparse_moe.experts".into()))
    }

    /// Where the experts of `layer` are.
    pub fn block(&self, layer: usize) -> Result<&MoeBlock> {
        self.blocks.get(&layer).ok_or_else(|| self.no_experts(format!("layers.{layer}.*.experts")))
    }

    /// The NVFP4 experts of `layer`, borrowed from the files: by ModelOpt or compressed-tensors, one tensor an expert
    /// or fused. Every expert is checked; an error names the tensor and all the experts that have the fault. Biases have no place
    /// here: experts with biases are an error.
    pub fn nvfp4_tensors(&self, layer: usize) -> Result<Vec<ExpertTensors<'_>>> {
        experts::nvfp4_tensors(&self.store, self.block(layer)?, &self.config)
    }

    /// The NVFP4 experts of `layer`, with their biases where they have any, in the layout that kernels read.
    pub fn load_nvfp4(&self, layer: usize) -> Result<Fp4Experts> {
        experts::load_nvfp4(&self.store, self.block(layer)?, &self.config)
    }

    /// The routed experts of `layer` in whatever format they are stored: NVFP4 as [`Checkpoint::load_nvfp4`] reads it, gpt-oss's
    /// MXFP4, bf16 (one set of tensors an expert, fused, or gpt-oss's), or e4m3 with one scale for each 128x128 block, as
    /// transformers and compressed-tensors write it. Biases come with them. All experts need the format of the first.
    pub fn load_experts(&self, layer: usize) -> Result<Experts> {
        moe::load_experts(&self.store, self.block(layer)?, &self.config)
    }

    /// Everything that the mixture-of-experts block of `layer` is made of: routed experts, router with its routing, shared expert,
    /// gating. Errors name the tensor, or the key of config.json.
    pub fn load_moe(&self, layer: usize) -> Result<MoeWeights> {
        moe::load(&self.store, self.block(layer)?, &self.config)
    }

    /// Shape of a layer with the given experts: theirs, with config.json's `num_experts_per_tok`.
    pub fn layer_shape(&self, experts: &Fp4Experts) -> Result<LayerShape> {
        let top_k = self.config.top_k()?;
        Ok(experts.shape().with_top_k(top_k))
    }

    /// What the checkpoint holds, layer by layer.
    pub fn inspect(&self) -> Inspect {
        inspect::inspect(self)
    }

    fn no_experts(&self, wanted: String) -> Error {
        let mut seen: Vec<&str> = self.store.names().filter(|name| name.contains("expert")).collect();
        if seen.is_empty() {
            seen = self.store.names().collect();
        }
        Error::Tensor {
            path: self.path.clone(),
            tensor: wanted,
            problem: format!("no routed experts there; tensors seen: {}", experts::list(&seen)),
        }
    }
}
