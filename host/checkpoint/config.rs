//! config.json: the dimensions of a model and how its router scores, in the spellings of the model families.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::formats::FP8_BLOCK;
use crate::types::{self, Gating, Groups, Routing};

/// Largest JSON file that is read; real ones stay below 20 MB.
const MAX_JSON: u64 = 256 << 20;

/// What config.json says about the mixture of experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    #[serde(skip)]
    path: PathBuf,
    /// `model_type`, for example `qwen3_moe`.
    pub model_type: String,
    /// `hidden_size`.
    pub hidden: Option<usize>,
    /// Width of an expert: `moe_intermediate_size`, or `intermediate_size` of families whose layers are all
    /// experts (Mixtral, gpt-oss).
    pub intermediate: Option<usize>,
    /// `num_local_experts`, `num_experts` or `n_routed_experts`.
    pub experts: Option<usize>,
    /// `num_experts_per_tok`.
    pub top_k: Option<usize>,
    /// `num_hidden_layers`.
    pub layers: Option<usize>,
    /// `first_k_dense_replace`: layers before this one have no experts.
    pub first_moe_layer: Option<usize>,
    /// How the router turns logits into scores.
    pub scoring: Scoring,
    /// Are the chosen weights divided by their sum? `norm_topk_prob`; where it is missing, as the family's own code does.
    pub normalize: bool,
    /// `routed_scaling_factor`, 1 where there is none.
    pub scaling_factor: f32,
    /// `n_group`, 1 where there is none.
    pub groups: usize,
    /// `topk_group`, 1 where there is none.
    pub top_groups: usize,
    /// `n_shared_experts`, 0 where there is none.
    pub shared_experts: usize,
    /// `hidden_act`.
    pub activation: Option<String>,
    /// `swiglu_limit`.
    pub swiglu_limit: Option<f32>,
    /// `quantization_config`.
    pub quantization: Option<Quantization>,
    /// `topk_method` (DeepSeek).
    pub topk_method: Option<String>,
    /// Whether `scoring_func` or the family says how the router scores.
    #[serde(skip)]
    scoring_known: bool,
}

/// Families whose routers have a correction bias and score by sigmoid.
const CORRECTED: [&str; 4] = ["deepseek_v3", "deepseek_v32", "glm4_moe", "kimi_k2"];

/// Families whose routers score by softmax.
const SOFTMAX: [&str; 5] = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"];

/// Families whose code does not normalise where `norm_topk_prob` is missing.
const UNNORMALIZED: [&str; 3] = ["qwen2_moe", "qwen3_moe", "olmoe"];

/// How a router turns logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// Softmax over the experts.
    Softmax,
    /// Softmax over the chosen experts alone.
    SelectedSoftmax,
    /// Sigmoid of each logit; a bias, where there is one, takes part in the choice alone.
    Sigmoid,
}

/// How the checkpoint says that it is quantised. Tensors have the last word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Quantization {
    /// `quant_method`: `modelopt`, `compressed-tensors`, `fp8` …
    pub method: Option<String>,
    /// `format` (compressed-tensors), for example `nvfp4-pack-quantized`.
    pub format: Option<String>,
    /// `quant_algo` (ModelOpt), for example `NVFP4`.
    pub algo: Option<String>,
    /// `weight_block_size` (fp8): rows and columns that share a scale.
    pub block: Option<[usize; 2]>,
}

impl ModelConfig {
    /// Reads a config.json.
    pub fn open(path: &Path) -> Result<Self> {
        let root: Map<String, Value> = read_json(path)?;
        let keys = Keys { path, root: &root, text: root.get("text_config").and_then(Value::as_object) };
        let model_type = keys.string("model_type")?.unwrap_or_default();
        let scoring = match keys.string("scoring_func")?.as_deref() {
            Some("softmax") => Scoring::Softmax,
            Some("sigmoid") => Scoring::Sigmoid,
            Some(other) => {
                return Err(keys.error("scoring_func", format!("`{other}`, `softmax` or `sigmoid` needed")));
            }
            // transformers 5 writes no key for these families.
            None if CORRECTED.contains(&model_type.as_str()) => Scoring::Sigmoid,
            None if model_type == "gpt_oss" => Scoring::SelectedSoftmax,
            None => Scoring::Softmax,
        };
        let scoring_known = keys.string("scoring_func")?.is_some()
            || model_type == "gpt_oss"
            || [&CORRECTED[..], &SOFTMAX].concat().contains(&model_type.as_str());
        let intermediate = match keys.size("moe_intermediate_size")? {
            Some(size) => Some(size),
            // Elsewhere it is the width of the dense layers.
            None if ["mixtral", "gpt_oss"].contains(&model_type.as_str()) => keys.size("intermediate_size")?,
            None => None,
        };
        Ok(Self {
            path: path.to_path_buf(),
            hidden: keys.size("hidden_size")?,
            intermediate,
            experts: keys.experts()?,
            top_k: keys.size("num_experts_per_tok")?,
            layers: keys.size("num_hidden_layers")?,
            first_moe_layer: keys.size("first_k_dense_replace")?,
            scoring,
            normalize: keys.bool("norm_topk_prob")?.unwrap_or(!UNNORMALIZED.contains(&model_type.as_str())),
            scaling_factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
            groups: keys.size("n_group")?.unwrap_or(1),
            top_groups: keys.size("topk_group")?.unwrap_or(1),
            shared_experts: keys.size("n_shared_experts")?.unwrap_or(0),
            activation: keys.string("hidden_act")?,
            scoring_known,
            topk_method: keys.string("topk_method")?,
            swiglu_limit: keys.float("swiglu_limit")?,
            quantization: keys.quantization()?,
            model_type,
        })
    }

    /// How the router's logits become expert ids and weights, or an error that names the key of which it is not known.
    pub fn routing(&self) -> Result<Routing> {
        let bad = |problem: String| Err(Error::Checkpoint { path: self.path.clone(), problem });
        if !self.scoring_known {
            return bad(format!(
                "`model_type` is `{}`, whose routing is not known, and there is no `scoring_func`",
                self.model_type
            ));
        }
        let grouped = self.groups > 1;
        match self.topk_method.as_deref() {
            None | Some("noaux_tc" | "greedy") => {}
            Some(other) if grouped => return bad(format!("`topk_method` is `{other}`, `noaux_tc` needed with groups")),
            Some(_) => {}
        }
        let scoring = match self.scoring {
            Scoring::Softmax => types::Scoring::Softmax,
            Scoring::SelectedSoftmax => types::Scoring::SelectedSoftmax,
            Scoring::Sigmoid => types::Scoring::Sigmoid,
        };
        let groups = (grouped && self.topk_method.as_deref() != Some("greedy"))
            .then_some(Groups { count: self.groups, keep: self.top_groups });
        if let (Some(groups), Some(experts)) = (groups, self.experts)
            && !experts.is_multiple_of(groups.count)
        {
            return bad(format!("`n_group` is {}, a divisor of {experts} experts needed", groups.count));
        }
        Ok(Routing {
            scoring,
            top_k: self.top_k()?,
            // The weights of SelectedSoftmax add up to 1 already.
            renormalize: self.normalize && scoring != types::Scoring::SelectedSoftmax,
            groups,
            scale: self.scaling_factor,
        })
    }

    /// What joins gate and up, from `hidden_act`, `swiglu_limit` and the family; or an error that names the key.
    pub fn gating(&self) -> Result<Gating> {
        let gating = match (self.model_type.as_str(), self.activation.as_deref()) {
            ("gpt_oss", _) => match (Gating::GPT_OSS, self.swiglu_limit) {
                (Gating::SwigluOai { alpha, .. }, Some(limit)) => Gating::SwigluOai { alpha, limit },
                (gating, _) => gating,
            },
            (_, None | Some("silu" | "swish")) => Gating::Silu { limit: self.swiglu_limit },
            (_, Some(other)) => {
                let problem = format!("`hidden_act` is `{other}`, `silu` needed");
                return Err(Error::Checkpoint { path: self.path.clone(), problem });
            }
        };
        let bad = |error: Error| Error::Checkpoint { path: self.path.clone(), problem: error.to_string() };
        gating.check().map(|()| gating).map_err(bad)
    }

    /// `Err` naming `weight_block_size` if there is one that is not 128 x 128.
    pub(super) fn check_fp8_block(&self) -> Result<()> {
        match self.quantization.as_ref().and_then(|quantization| quantization.block) {
            Some(block) if block != [FP8_BLOCK; 2] => {
                let problem = format!("`weight_block_size` is {block:?}, [{FP8_BLOCK}, {FP8_BLOCK}] needed");
                Err(Error::Checkpoint { path: self.path.clone(), problem })
            }
            _ => Ok(()),
        }
    }

    /// Whether the family's routers have a correction bias.
    pub(super) fn has_correction_bias(&self) -> bool {
        CORRECTED.contains(&self.model_type.as_str())
    }

    /// Whether the family's routers have a bias on the logits.
    pub(super) fn has_router_bias(&self) -> bool {
        self.model_type == "gpt_oss"
    }

    /// Whether fused experts are gpt-oss's: gate and up by turns.
    pub(super) fn interleaved(&self) -> bool {
        self.model_type == "gpt_oss"
    }

    /// `num_experts_per_tok`, or an error that names it.
    pub fn top_k(&self) -> Result<usize> {
        self.top_k.ok_or_else(|| Error::Checkpoint {
            path: self.path.clone(),
            problem: "`num_experts_per_tok` is missing".into(),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Typed look-ups, in the text part of a multimodal model first.
struct Keys<'a> {
    path: &'a Path,
    root: &'a Map<String, Value>,
    text: Option<&'a Map<String, Value>>,
}

impl Keys<'_> {
    fn error(&self, key: &str, problem: String) -> Error {
        Error::Checkpoint { path: self.path.to_path_buf(), problem: format!("`{key}` is {problem}") }
    }

    fn get<T>(&self, key: &str, needed: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        match self.text.and_then(|text| text.get(key)).or_else(|| self.root.get(key)) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                read(value).map(Some).ok_or_else(|| self.error(key, format!("{}, {needed} needed", shorten(value))))
            }
        }
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key, "a whole number", |value| value.as_u64().and_then(|size| usize::try_from(size).ok()))
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        self.get(key, "a finite number", |value| value.as_f64().map(|x| x as f32).filter(|x| x.is_finite()))
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "true or false", Value::as_bool)
    }

    fn string(&self, key: &str) -> Result<Option<String>> {
        self.get(key, "a string", |value| value.as_str().map(str::to_string))
    }

    /// The expert count under any of its names; they must not contradict each other.
    fn experts(&self) -> Result<Option<usize>> {
        let mut found: Option<(&str, usize)> = None;
        for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
            match (found, self.size(key)?) {
                (Some((other, count)), Some(size)) if size != count => {
                    return Err(self.error(key, format!("{size}, but `{other}` is {count}")));
                }
                (None, Some(size)) => found = Some((key, size)),
                _ => {}
            }
        }
        Ok(found.map(|(_, count)| count))
    }

    fn quantization(&self) -> Result<Option<Quantization>> {
        let config = self.get("quantization_config", "an object", |value| value.as_object().cloned())?;
        let Some(config) = config else { return Ok(None) };
        let keys = Keys { path: self.path, root: &config, text: None };
        Ok(Some(Quantization {
            method: keys.string("quant_method")?,
            format: keys.string("format")?,
            algo: keys.string("quant_algo")?,
            block: keys.get("weight_block_size", "two whole numbers", |value| {
                let size = |index: usize| usize::try_from(value.get(index)?.as_u64()?).ok();
                value.as_array().filter(|sizes| sizes.len() == 2)?;
                Some([size(0)?, size(1)?])
            })?,
        }))
    }
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Reads a JSON file of a sane size.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let bad = |problem| Error::Checkpoint { path: path.to_path_buf(), problem };
    let metadata = std::fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return Err(bad("not a regular file".into()));
    }
    if metadata.len() > MAX_JSON {
        return Err(bad(format!("{} bytes, at most {MAX_JSON} are read", metadata.len())));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    serde_json::from_slice(&bytes).map_err(|error| bad(format!("not the JSON that was expected: {error}")))
}

/// A JSON object in which a name that comes twice is an error. Parsers usually keep the last one in silence.
#[derive(Debug)]
pub(super) struct NoDuplicates<T>(pub BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NoDuplicates<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = BTreeMap<String, T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Self::Value, A::Error> {
                let mut map = BTreeMap::new();
                while let Some((key, value)) = access.next_entry::<String, T>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format!("`{key}` comes twice")));
                    }
                    map.insert(key, value);
                }
                Ok(map)
            }
        }
        deserializer.deserialize_map(Entries(PhantomData)).map(NoDuplicates)
    }
}
