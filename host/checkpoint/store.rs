//! Safetensors files, memory-mapped and validated: one file, or shards with an index.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;

use super::config::{NoDuplicates, read_json};
use crate::error::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of one safetensors file or of a set of shards.
#[derive(Debug)]
pub struct TensorStore {
    path: PathBuf,
    files: Vec<TensorFile>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes of the file; checked to lie within it.
    range: std::ops::Range<usize>,
}

/// One tensor, borrowed from its file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the last one contiguous.
    pub shape: &'a [usize],
    /// Raw little-endian bytes; of the length that dtype and shape say, but not aligned.
    pub bytes: &'a [u8],
    /// The file.
    pub path: &'a Path,
}

impl TensorStore {
    /// Opens a .safetensors file, or a folder with model.safetensors or with model.safetensors.index.json and shards.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_file() {
            return Self::open_file(path);
        }
        if path.join(SINGLE).exists() {
            return Self::open_file(&path.join(SINGLE)).map(|store| Self { path: path.to_path_buf(), ..store });
        }
        if path.join(INDEX).exists() {
            return Self::open_shards(path);
        }
        let problem = if path.is_dir() {
            format!("neither {SINGLE} nor {INDEX} in this folder")
        } else {
            "no such file or folder".to_string()
        };
        Err(Error::Checkpoint { path: path.to_path_buf(), problem })
    }

    fn open_file(path: &Path) -> Result<Self> {
        let (file, infos) = TensorFile::open(path)?;
        let tensors = infos.into_iter().map(|(name, info)| (name, file.entry(0, info))).collect();
        Ok(Self { path: path.to_path_buf(), files: vec![file], tensors })
    }

    fn open_shards(folder: &Path) -> Result<Self> {
        let index_path = folder.join(INDEX);
        let index: Index = read_json(&index_path)?;
        let bad = |problem| Error::Checkpoint { path: index_path.clone(), problem };

        let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (tensor, shard) in index.weight_map.0 {
            shards.entry(shard).or_default().push(tensor);
        }
        // Before any is opened: the index comes from outside, and may point to files of this folder and nowhere else.
        for (shard, tensors) in &shards {
            if !is_plain_file_name(shard) {
                return Err(bad(format!("the shard `{shard}` of `{}` is no plain file name", tensors[0])));
            }
            if !folder.join(shard).exists() {
                return Err(bad(format!("the shard `{shard}` with `{}` is missing", tensors[0])));
            }
        }
        let mut store = Self { path: folder.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        for (shard, tensors) in shards {
            let path = folder.join(&shard);
            let number = store.files.len();
            let (file, mut infos) = TensorFile::open(&path)?;
            for tensor in tensors {
                let info = infos.remove(&tensor).ok_or_else(|| Error::Tensor {
                    path: path.clone(),
                    tensor: tensor.clone(),
                    problem: "the index names this file, but the tensor is not in it".into(),
                })?;
                store.tensors.insert(tensor, file.entry(number, info));
            }
            if let Some(tensor) = infos.into_keys().next() {
                let problem = "in this file, but the index does not say so (duplicated or stale shard)".into();
                return Err(Error::Tensor { path, tensor, problem });
            }
            store.files.push(file);
        }
        Ok(store)
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Files that hold the tensors.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All tensors, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    /// The tensors whose name begins with `prefix`, sorted.
    pub fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = Tensor<'a>> + 'a {
        self.tensors
            .range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded))
            .take_while(move |(name, _)| name.starts_with(prefix))
            .map(|(name, entry)| self.view(name, entry))
    }

    /// The tensor `name`, if there is one.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensors.get_key_value(name).map(|(name, entry)| self.view(name, entry))
    }

    /// The tensor `name`, or an error that names it.
    pub fn get(&self, name: &str) -> Result<Tensor<'_>> {
        self.find(name).ok_or_else(|| Error::Tensor {
            path: self.path.clone(),
            tensor: name.to_string(),
            problem: "missing".into(),
        })
    }

    /// Value of `key` in the `__metadata__` of the first file that has it.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.files.iter().find_map(|file| file.metadata.get(key)).map(String::as_str)
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> Tensor<'a> {
        let file = &self.files[entry.file];
        Tensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &file.map[entry.range.clone()],
            path: &file.path,
        }
    }
}

impl<'a> Tensor<'a> {
    /// An [`Error::Tensor`] about this tensor.
    pub fn error(&self, problem: impl Into<String>) -> Error {
        Error::Tensor { path: self.path.to_path_buf(), tensor: self.name.to_string(), problem: problem.into() }
    }

    /// `Err` unless the tensor has this type and shape.
    pub fn expect(&self, dtype: Dtype, shape: &[usize]) -> Result<()> {
        if self.dtype == dtype && self.shape == shape {
            return Ok(());
        }
        Err(self.error(format!("{} {:?}, {dtype} {shape:?} needed", self.dtype, self.shape)))
    }

    /// The dimensions of a tensor of this type and rank.
    pub fn dims<const N: usize>(&self, dtype: Dtype) -> Result<[usize; N]> {
        match <[usize; N]>::try_from(self.shape) {
            Ok(dims) if self.dtype == dtype => Ok(dims),
            _ => Err(self.error(format!("{} {:?}, {dtype} with {N} dimensions needed", self.dtype, self.shape))),
        }
    }

    /// The elements of an F32 tensor.
    pub fn f32(&self) -> Result<Vec<f32>> {
        Ok(self.words(Dtype::F32)?.map(f32::from_le_bytes).collect())
    }

    /// The elements of an I32 tensor.
    pub fn i32(&self) -> Result<Vec<i32>> {
        Ok(self.words(Dtype::I32)?.map(i32::from_le_bytes).collect())
    }

    /// The bits of a BF16 tensor.
    pub fn bf16(&self) -> Result<Vec<u16>> {
        Ok(self.words(Dtype::BF16)?.map(u16::from_le_bytes).collect())
    }

    fn words<const N: usize>(&self, dtype: Dtype) -> Result<impl Iterator<Item = [u8; N]> + use<'a, N>> {
        if self.dtype != dtype {
            return Err(self.error(format!("{}, {dtype} needed", self.dtype)));
        }
        Ok(self.bytes.as_chunks().0.iter().copied())
    }
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    map: Mmap,
    data_start: usize,
    metadata: BTreeMap<String, String>,
}

impl TensorFile {
    fn open(path: &Path) -> Result<(Self, BTreeMap<String, TensorInfo>)> {
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        let bad = |problem| Error::Checkpoint { path: path.to_path_buf(), problem };
        // A pipe or a device would block or have no size.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(bad("not a regular file".into()));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the mapping is private and read-only, and only read as bytes, for which every content is valid.
        // Another process that changes the file changes those bytes; that is documented at `Checkpoint::open`, and
        // nothing here reads a byte twice and relies on both values being equal, but for the validated header, of which
        // an owned copy is kept.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        check_header(&map).map_err(bad)?;
        let (header_len, header) = SafeTensors::read_metadata(&map)
            .map_err(|error| bad(format!("no valid safetensors file of {} bytes: {error}", map.len())))?;
        let infos = header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let data_start = header_len + HEADER_START;
        Ok((Self { path: path.to_path_buf(), map, data_start, metadata }, infos))
    }

    fn entry(&self, file: usize, info: TensorInfo) -> Entry {
        let (start, end) = info.data_offsets;
        Entry { file, dtype: info.dtype, shape: info.shape, range: self.data_start + start..self.data_start + end }
    }
}

/// The header follows its own length in eight bytes.
const HEADER_START: usize = 8;

/// Checks every data offset against the file, and that no name comes twice.
///
/// The `safetensors` crate validates the rest, but it adds the end of the data to the header's length, which panics
/// where overflow is checked, and it keeps the last of two tensors with one name.
fn check_header(bytes: &[u8]) -> std::result::Result<(), String> {
    let too_short = || format!("{} bytes are too few for the header", bytes.len());
    let (length, rest) = bytes.split_first_chunk::<HEADER_START>().ok_or_else(too_short)?;
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length)
        .ok()
        .and_then(|length| rest.get(..length))
        .ok_or_else(|| format!("a header of {length} bytes in a file of {} bytes", bytes.len()))?;
    let data_len = rest.len() - header.len();
    let header: NoDuplicates<HeaderEntry> =
        serde_json::from_slice(header).map_err(|error| format!("no valid safetensors header: {error}"))?;
    for (name, entry) in header.0 {
        if let Some((_, end)) = entry.data_offsets
            && end > data_len as u64
        {
            return Err(format!("tensor `{name}` ends at byte {end} of {data_len} bytes of data"));
        }
    }
    Ok(())
}

#[derive(Deserialize)]
struct HeaderEntry {
    /// Absent in `__metadata__`.
    #[serde(default)]
    data_offsets: Option<(u64, u64)>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: NoDuplicates<String>,
}

fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(['/', '\\', '\0'])
}
