//! Case files: one operation and its input as JSON, with raw bytes where bits matter. docs/case-format.md describes them.

use super::case::{Case, one};
use super::op::{Element, Op, OpCase, check_memory, name_of};
use crate::error::{Error, Result};
use crate::reference::math;
use crate::types::{Activation, Gating, LayerOptions, LayerShape, Order, Split, WeightFormat, XType};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use kernels_gpu::layout::scale::{padded_cols, swizzled_len, swizzled_offset};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// An operation's input, and the output where the file says what is right.
#[derive(Clone, Debug)]
pub struct CaseFile {
    /// The input.
    pub case: OpCase,
    /// Bits that every back end must give.
    pub expected: Option<Vec<u32>>,
    /// Free text.
    pub comment: Option<String>,
}

/// Largest file that is read.
const MAX_FILE: u64 = 1 << 30;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    op: Op,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    comment: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shape: Option<FileShape>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokens: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rows: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cols: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    activation: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    x_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    order: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    split: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gating: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alpha: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<f32>,
    #[serde(default)]
    arrays: BTreeMap<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expected: Option<Value>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileShape {
    hidden: usize,
    intermediate: usize,
    output: Option<usize>,
    experts: usize,
    top_k: usize,
}

type Problem<T> = std::result::Result<T, String>;

impl CaseFile {
    /// Reads a case file, or lines of `type, family, a, b, c, d` for `mma_m16n8k16` where the name ends in `.tsv`. Errors name the
    /// file and the key.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |problem: String| Error::Checkpoint { path: path.to_path_buf(), problem };
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        let metadata = std::fs::metadata(path).map_err(io)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE {
            return Err(bad(format!("a regular file of at most {MAX_FILE} bytes needed")));
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        let read = if path.extension().is_some_and(|extension| extension == "tsv") {
            parse_golden(&text).map_err(bad)?
        } else {
            Self::parse(&text).map_err(bad)?
        };
        read.case.check().map_err(|error| bad(error.to_string()))?;
        Ok(read)
    }

    /// Reads the text of a case file. The error names the key.
    pub fn parse(text: &str) -> Problem<Self> {
        let mut file: File = serde_json::from_str(text).map_err(|error| format!("not a case file: {error}"))?;
        let unused = |file: &File| match file.arrays.keys().next() {
            Some(name) => Err(format!("`arrays`: `{}` has no array `{name}`", file.op)),
            None => Ok(()),
        };
        let case = parse_case(&mut file)?;
        unused(&file)?;
        let expected = file.expected.take().map(|value| {
            let (element, dims) = output_of(&case);
            Ok::<_, String>(bits_of(element, &parse_array("expected", value, element, &dims, None)?))
        });
        Ok(CaseFile { case, expected: expected.transpose()?, comment: file.comment })
    }

    /// The text of a file that gives this case again: sizes as numbers, arrays in base64.
    pub fn to_json(&self) -> String {
        let mut file = to_file(&self.case);
        file.comment = self.comment.clone();
        file.expected = self.expected.as_ref().map(|bits| {
            let (element, _) = output_of(&self.case);
            raw(&bytes_of(element, bits))
        });
        serde_json::to_string_pretty(&file).expect("plain structures with string keys")
    }

    /// Writes [`CaseFile::to_json`].
    pub fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.to_json() + "\n").map_err(|source| Error::Io { path: path.to_path_buf(), source })
    }
}

/// Type and dimensions of an operation's output.
fn output_of(case: &OpCase) -> (Element, Vec<usize>) {
    match case {
        OpCase::Layer(case) => (Element::Bf16, vec![case.tokens, case.shape.output]),
        OpCase::Swiglu { gate, .. } => (Element::Bf16, vec![gate.len()]),
        OpCase::Exp { x } => (Element::F32, vec![x.len()]),
        OpCase::E4m3Encode { x } => (Element::Byte, vec![x.len()]),
        OpCase::E4m3Decode { codes, .. } | OpCase::E2m1Decode { codes, .. } => (Element::F32, vec![codes.len()]),
        OpCase::Swizzle { rows, cols, .. } => (Element::Byte, vec![swizzled_len(*rows, *cols)]),
        OpCase::Mma { c, .. } => (Element::F32, vec![c.len()]),
    }
}

fn parse_case(file: &mut File) -> Problem<OpCase> {
    let activation = parse_format("activation", file.activation.as_deref())?;
    let count = file.count;
    match file.op {
        Op::Nvfp4Layer => parse_layer(file, WeightFormat::Nvfp4, activation),
        Op::Mxfp4Layer => parse_layer(file, WeightFormat::Mxfp4, activation),
        Op::Swiglu => {
            let mut floats = |name: &str| take(file, name, Element::F32, count, 1).map(|bytes| cast(&bytes));
            let (gate, up) = (floats("gate")?, floats("up")?);
            Ok(OpCase::Swiglu { gate, up, gating: parse_gating(file)? })
        }
        Op::Exp => Ok(OpCase::Exp { x: cast(&take(file, "x", Element::F32, count, 1)?) }),
        Op::E4m3Encode => Ok(OpCase::E4m3Encode { x: cast(&take(file, "x", Element::F32, count, 1)?) }),
        Op::E4m3Decode => Ok(OpCase::E4m3Decode { activation, codes: take(file, "codes", Element::Byte, count, 1)? }),
        Op::E2m1Decode => {
            let codes = take(file, "codes", Element::Byte, count, 1)?;
            match codes.iter().find(|code| **code > 15) {
                Some(code) => Err(format!("`codes`: {code:#04x} is no E2M1 code, 0x0 to 0xf needed")),
                None => Ok(OpCase::E2m1Decode { activation, codes }),
            }
        }
        Op::Swizzle => {
            let size = |name: &str, size: Option<usize>, most: usize| {
                let size = size.ok_or_else(|| format!("`{name}` is missing"))?;
                if size > most { Err(format!("`{name}` is {size}, at most {most} allowed")) } else { Ok(size) }
            };
            let (rows, cols) = (size("rows", file.rows, 1 << 20)?, size("cols", file.cols, 1 << 10)?);
            let scales = take_shaped(file, "scales", Element::Byte, &[rows, cols], None)?;
            Ok(OpCase::Swizzle { rows, cols, scales })
        }
        Op::Mma => {
            let element = element_of(activation);
            let a = cast(&take(file, "a", element, count, 16)?);
            let b = cast(&take(file, "b", element, count, 16)?);
            Ok(OpCase::Mma { activation, a, b, c: cast(&take(file, "c", Element::F32, count, 1)?) })
        }
    }
}

fn parse_gating(file: &File) -> Problem<Gating> {
    match (file.gating.as_deref(), file.alpha, file.limit) {
        (None | Some("silu"), None, limit) => Ok(Gating::Silu { limit }),
        (None | Some("silu"), Some(_), _) => Err("`alpha` belongs to the gating swiglu_oai".into()),
        (Some("swiglu_oai"), Some(alpha), Some(limit)) => Ok(Gating::SwigluOai { alpha, limit }),
        (Some("swiglu_oai"), None, _) => Err("`alpha` is missing".into()),
        (Some("swiglu_oai"), _, None) => Err("`limit` is missing".into()),
        (Some(other), ..) => Err(format!("`gating` is `{other}`, silu or swiglu_oai needed")),
    }
}

/// Without an `order` it is seed, whatever a layer's own default is: a file means the same for ever.
fn parse_order(file: &File) -> Problem<Order> {
    match (file.order.as_deref(), file.split) {
        (None | Some("seed"), None) => Ok(Order::Seed { split: Split::S4 }),
        (None | Some("seed"), Some(count)) => Split::ALL
            .into_iter()
            .find(|split| split.count() == count)
            .map(|split| Order::Seed { split })
            .ok_or_else(|| format!("`split` is {count}, 1, 2, 4 or 8 needed")),
        (Some("decode"), None) => Ok(Order::Decode),
        (Some("decode"), Some(_)) => Err("`split` belongs to the order seed".into()),
        (Some(other), _) => Err(format!("`order` is `{other}`, seed or decode needed")),
    }
}

fn parse_layer(file: &mut File, format: WeightFormat, activation: Activation) -> Problem<OpCase> {
    let shape = file.shape.take().ok_or("`shape` is missing")?;
    let FileShape { hidden, intermediate, output, experts, top_k } = shape;
    let shape = LayerShape { hidden, intermediate, output: output.unwrap_or(hidden), experts, top_k };
    let options = LayerOptions { format, activation, order: parse_order(file)?, gating: parse_gating(file)? };
    let tokens = file.tokens.ok_or("`tokens` is missing")?;
    crate::plan::check(&shape, &options).map_err(|error| error.to_string())?;
    check_memory(&shape, tokens).map_err(|error| error.to_string())?;

    let x_type = match parse_format("x_type", file.x_type.as_deref())? {
        Activation::Bf16 => XType::Bf16,
        Activation::F16 => XType::F16,
    };
    let mut case = Case::blank_in(format, shape, tokens);
    (case.options, case.x_type) = (options, x_type);
    for spec in layer_arrays(&case) {
        let Some(value) = file.arrays.remove(spec.name) else { continue };
        let bytes = parse_array(spec.name, value, spec.element, &spec.dims, spec.scales)?;
        match spec.name {
            "x" => case.x = cast(&bytes),
            "topk_ids" => case.topk_ids = cast(&bytes),
            "topk_w" => case.topk_w = cast(&bytes),
            "w13" => case.w13 = bytes,
            "s13" => case.s13 = bytes,
            "alpha1" => case.alpha1 = cast(&bytes),
            "b13" => case.b13 = Some(cast(&bytes)),
            "b2" => case.b2 = Some(cast(&bytes)),
            "w2" => case.w2 = bytes,
            "s2" => case.s2 = bytes,
            _ => case.alpha2 = cast(&bytes),
        }
    }
    Ok(OpCase::Layer(Box::new(case)))
}

struct Spec {
    name: &'static str,
    element: Element,
    dims: Vec<usize>,
    /// Of an array of block scales.
    scales: Option<Scales>,
}

/// Block scales: rows and columns of an expert, and the byte of 1, which they are by default.
#[derive(Clone, Copy)]
struct Scales {
    rows: usize,
    cols: usize,
    one: u8,
}

fn layer_arrays(case: &Case) -> Vec<Spec> {
    let LayerShape { hidden, intermediate, output, experts, top_k } = case.shape;
    let (tokens, format, block) = (case.tokens, case.options.format, case.block());
    let x = if case.x_type == XType::Bf16 { Element::Bf16 } else { Element::F16 };
    let spec = |name, element, dims: &[usize]| Spec { name, element, dims: dims.to_vec(), scales: None };
    let scales = |name, rows, cols| Spec {
        name,
        element: Element::Byte,
        dims: vec![experts, swizzled_len(rows, cols)],
        scales: Some(Scales { rows, cols, one: one(format) }),
    };
    let mut arrays = vec![
        spec("x", x, &[tokens, hidden]),
        spec("topk_ids", Element::I32, &[tokens, top_k]),
        spec("topk_w", Element::F32, &[tokens, top_k]),
        spec("w13", Element::Code, &[experts, 2 * intermediate, hidden]),
        scales("s13", 2 * intermediate, hidden / block),
        spec("b13", Element::F32, &[experts, 2 * intermediate]),
        spec("w2", Element::Code, &[experts, output, intermediate]),
        scales("s2", output, intermediate / block),
        spec("b2", Element::F32, &[experts, output]),
    ];
    if format == WeightFormat::Nvfp4 {
        arrays.extend([spec("alpha1", Element::F32, &[experts, 2]), spec("alpha2", Element::F32, &[experts])]);
    }
    arrays
}

/// The array `name` of `count` times `each` elements. Without a count the array's own length decides.
fn take(file: &mut File, name: &str, element: Element, count: Option<usize>, each: usize) -> Problem<Vec<u8>> {
    let value = file.arrays.get(name).ok_or_else(|| format!("`arrays`: `{name}` is missing"))?;
    let count = match (count, value) {
        (Some(count), _) => count,
        (None, Value::Array(values)) => values.len() / each,
        (None, Value::Object(object)) if object.contains_key("hex") || object.contains_key("base64") => {
            raw_bytes(name, object)?.len() / size_of(element) / each
        }
        (None, _) => return Err(format!("`count` is missing: the length of `{name}` does not follow from its form")),
    };
    if count > 1 << 26 {
        return Err(format!("`count` is {count}, at most {} allowed", 1 << 26));
    }
    let dims = if each == 1 { vec![count] } else { vec![count, each] };
    take_shaped(file, name, element, &dims, None)
}

fn take_shaped(
    file: &mut File,
    name: &str,
    element: Element,
    dims: &[usize],
    scales: Option<Scales>,
) -> Problem<Vec<u8>> {
    let value = file.arrays.remove(name).ok_or_else(|| format!("`arrays`: `{name}` is missing"))?;
    parse_array(name, value, element, dims, scales)
}

/// Bytes of an array in memory. For swizzled `scales` a list of three coordinates
/// means expert, row and column, and a fill leaves the padding at 0.
fn parse_array(name: &str, value: Value, element: Element, dims: &[usize], scales: Option<Scales>) -> Problem<Vec<u8>> {
    let len: usize = dims.iter().product();
    let needed = if element == Element::Code { len / 2 } else { len * size_of(element) };
    let mut object = match value {
        Value::Array(values) => {
            if values.len() != len {
                return Err(format!("`{name}` has {} elements: {len} needed, {dims:?}", values.len()));
            }
            let bits = values.iter().map(|value| parse_element(name, value, element));
            return Ok(bytes_of(element, &bits.collect::<Problem<Vec<u32>>>()?));
        }
        Value::Object(object) => object,
        other => return Err(format!("`{name}` is {other}: a list or an object needed")),
    };
    let fill = object.remove("fill");
    let mut bytes = if object.contains_key("hex") || object.contains_key("base64") {
        if fill.is_some() {
            return Err(format!("`{name}` has both raw bytes and `fill`"));
        }
        let bytes = raw_bytes(name, &object)?;
        object.remove("hex");
        object.remove("base64");
        if bytes.len() != needed {
            return Err(format!("`{name}` has {} bytes: {needed} needed", bytes.len()));
        }
        bytes
    } else {
        let default = scales.map_or(json!(0), |scales| json!(scales.one));
        let bits = parse_element(name, &fill.unwrap_or(default), element)?;
        match scales {
            None => filled(element, bits, needed),
            Some(Scales { rows, cols, .. }) => {
                let mut bytes = vec![0; needed];
                for expert in bytes.chunks_mut(swizzled_len(rows, cols).max(1)) {
                    for_used(rows, cols, |offset| expert[offset] = bits as u8);
                }
                bytes
            }
        }
    };
    if let (Some(value), Some(Scales { rows, cols, .. })) = (object.get("padding"), scales) {
        let byte = parse_element(name, value, element)? as u8;
        let each = swizzled_len(rows, cols).max(1);
        let mut padding = vec![true; each];
        for_used(rows, cols, |offset| padding[offset] = false);
        for expert in bytes.chunks_mut(each) {
            expert.iter_mut().zip(&padding).filter(|(_, padding)| **padding).for_each(|(to, _)| *to = byte);
        }
        object.remove("padding");
    }
    if let Some(set) = object.remove("set") {
        let Value::Array(pairs) = set else {
            return Err(format!("`{name}`: `set` is no list of [index, value]"));
        };
        for pair in &pairs {
            let Some([index, value]) = pair.as_array().map(Vec::as_slice).and_then(|pair| pair.first_chunk::<2>())
            else {
                return Err(format!("`{name}`: `set` holds {pair}: [index, value] needed"));
            };
            let index = parse_index(name, index, dims, scales)?;
            let bits = parse_element(name, value, element)?;
            store(&mut bytes, element, index, bits);
        }
    }
    match object.keys().next() {
        Some(key) => {
            Err(format!("`{name}` has an unknown key `{key}`: fill, padding (scales only), hex, base64 or set"))
        }
        None => Ok(bytes),
    }
}

/// A flat index, or one coordinate a dimension.
fn parse_index(name: &str, index: &Value, dims: &[usize], scales: Option<Scales>) -> Problem<usize> {
    let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
    let len: usize = dims.iter().product();
    let outside = |dims: &[usize]| format!("`{name}`: index {index} is outside {dims:?}");
    match index {
        Value::Array(coordinates) => {
            let logical = match scales {
                Some(Scales { rows, cols, .. }) => vec![dims[0], rows, cols],
                None => dims.to_vec(),
            };
            let coordinates: Option<Vec<usize>> = coordinates.iter().map(number).collect();
            let coordinates = coordinates.filter(|c| c.len() == logical.len()).ok_or_else(|| outside(&logical))?;
            if coordinates.iter().zip(&logical).any(|(at, size)| at >= size) {
                return Err(outside(&logical));
            }
            Ok(match scales {
                Some(Scales { cols, .. }) => {
                    coordinates[0] * dims[1] + swizzled_offset(coordinates[1], coordinates[2], padded_cols(cols))
                }
                None => coordinates.iter().zip(&logical).fold(0, |flat, (at, size)| flat * size + at),
            })
        }
        value => number(value).filter(|flat| *flat < len).ok_or_else(|| outside(&[len])),
    }
}

/// Bits of an element: `"0x…"` are the bits, anything else is a value.
fn parse_element(name: &str, value: &Value, element: Element) -> Problem<u32> {
    let most = match element.digits() {
        8 => u32::MAX,
        digits => (1 << (4 * digits)) - 1,
    };
    let wrong =
        || format!("`{name}`: {value} is no element: a number, \"nan\", \"inf\", \"-inf\" or bits as \"0x…\" needed");
    if let Some(digits) = value.as_str().and_then(|text| text.strip_prefix("0x")) {
        let bits = u32::from_str_radix(digits, 16).map_err(|_| wrong())?;
        return if bits <= most { Ok(bits) } else { Err(format!("`{name}`: {value} has more bits than an element")) };
    }
    let float = match value {
        Value::Number(number) => number.as_f64().map(|number| number as f32),
        Value::String(text) => match text.as_str() {
            "nan" => Some(f32::NAN),
            "inf" => Some(f32::INFINITY),
            "-inf" => Some(f32::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    };
    match element {
        Element::Bf16 => float.map(|value| u32::from(math::from_f32(Activation::Bf16, value))),
        Element::F16 => float.map(|value| u32::from(math::from_f32(Activation::F16, value))),
        Element::F32 => float.map(f32::to_bits),
        Element::I32 => value.as_i64().and_then(|number| i32::try_from(number).ok()).map(|number| number as u32),
        Element::Code | Element::Byte => {
            value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= most)
        }
    }
    .ok_or_else(wrong)
}

fn raw_bytes(name: &str, object: &serde_json::Map<String, Value>) -> Problem<Vec<u8>> {
    let text = |key: &str| {
        object.get(key).map(|value| value.as_str().ok_or_else(|| format!("`{name}`: `{key}` is no string")))
    };
    match (text("hex").transpose()?, text("base64").transpose()?) {
        (Some(digits), None) => {
            let digits: String = digits.chars().filter(|c| !c.is_whitespace()).collect();
            hex::decode(digits).map_err(|error| format!("`{name}`: `hex`: {error}"))
        }
        (None, Some(text)) => BASE64.decode(text).map_err(|error| format!("`{name}`: `base64`: {error}")),
        _ => Err(format!("`{name}` has both `hex` and `base64`")),
    }
}

/// Calls `with` for the swizzled offset of every scale of a matrix.
fn for_used(rows: usize, cols: usize, mut with: impl FnMut(usize)) {
    for row in 0..rows {
        for col in 0..cols {
            with(swizzled_offset(row, col, padded_cols(cols)));
        }
    }
}

/// Bytes of an element; a code has half of one.
const fn size_of(element: Element) -> usize {
    element.digits().div_ceil(2)
}

fn filled(element: Element, bits: u32, len: usize) -> Vec<u8> {
    if element == Element::Code {
        return vec![(bits | bits << 4) as u8; len];
    }
    let bytes = bits.to_le_bytes();
    bytes[..size_of(element)].iter().copied().cycle().take(len).collect()
}

fn store(bytes: &mut [u8], element: Element, index: usize, bits: u32) {
    if element == Element::Code {
        let byte = &mut bytes[index / 2];
        let shift = 4 * (index % 2);
        *byte = *byte & !(0xf << shift) | (bits as u8) << shift;
    } else {
        let size = size_of(element);
        bytes[index * size..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
    }
}

fn bytes_of(element: Element, bits: &[u32]) -> Vec<u8> {
    let mut bytes =
        vec![0; if element == Element::Code { bits.len().div_ceil(2) } else { bits.len() * size_of(element) }];
    for (index, &bits) in bits.iter().enumerate() {
        store(&mut bytes, element, index, bits);
    }
    bytes
}

fn bits_of(element: Element, bytes: &[u8]) -> Vec<u32> {
    let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
    bytes.chunks_exact(size_of(element)).map(word).collect()
}

/// Little-endian bytes as elements.
fn cast<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(std::mem::size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn raw(bytes: &[u8]) -> Value {
    json!({ "base64": BASE64.encode(bytes) })
}

fn element_of(activation: Activation) -> Element {
    match activation {
        Activation::Bf16 => Element::Bf16,
        Activation::F16 => Element::F16,
    }
}

fn parse_format(key: &str, text: Option<&str>) -> Problem<Activation> {
    match text {
        None | Some("bf16") => Ok(Activation::Bf16),
        Some("f16") => Ok(Activation::F16),
        Some(other) => Err(format!("`{key}` is `{other}`, bf16 or f16 needed")),
    }
}

fn to_file(case: &OpCase) -> File {
    let mut file = File {
        op: case.op(),
        comment: None,
        shape: None,
        tokens: None,
        count: None,
        rows: None,
        cols: None,
        activation: None,
        x_type: None,
        order: None,
        split: None,
        gating: None,
        alpha: None,
        limit: None,
        arrays: BTreeMap::new(),
        expected: None,
    };
    let mut arrays = BTreeMap::new();
    let mut array = |name: &str, bytes: &[u8]| {
        arrays.insert(name.into(), raw(bytes));
    };
    let gate = |file: &mut File, gating: Gating| {
        file.limit = gating.limit();
        if let Gating::SwigluOai { alpha, .. } = gating {
            (file.gating, file.alpha) = (Some("swiglu_oai".into()), Some(alpha));
        }
    };
    match case {
        OpCase::Layer(case) => {
            array("x", bytemuck::cast_slice(&case.x));
            array("topk_ids", bytemuck::cast_slice(&case.topk_ids));
            array("topk_w", bytemuck::cast_slice(&case.topk_w));
            array("w13", &case.w13);
            array("s13", &case.s13);
            if case.options.format == WeightFormat::Nvfp4 {
                array("alpha1", bytemuck::cast_slice(case.alpha1.as_flattened()));
                array("alpha2", bytemuck::cast_slice(&case.alpha2));
            }
            for (name, biases) in [("b13", &case.b13), ("b2", &case.b2)] {
                if let Some(biases) = biases {
                    array(name, bytemuck::cast_slice(biases));
                }
            }
            array("w2", &case.w2);
            array("s2", &case.s2);
            let LayerShape { hidden, intermediate, output, experts, top_k } = case.shape;
            file.shape = Some(FileShape { hidden, intermediate, output: Some(output), experts, top_k });
            file.tokens = Some(case.tokens);
            file.activation = Some(name_of(case.options.activation).into());
            file.x_type = Some(if case.x_type == XType::Bf16 { "bf16" } else { "f16" }.into());
            file.order = Some(case.options.order.name().into());
            if let Order::Seed { split } = case.options.order {
                file.split = Some(split.count());
            }
            gate(&mut file, case.options.gating);
        }
        OpCase::Swiglu { gate: gates, up, gating } => {
            array("gate", bytemuck::cast_slice(gates));
            array("up", bytemuck::cast_slice(up));
            file.count = Some(gates.len());
            gate(&mut file, *gating);
        }
        OpCase::Exp { x } | OpCase::E4m3Encode { x } => {
            array("x", bytemuck::cast_slice(x));
            file.count = Some(x.len());
        }
        OpCase::E4m3Decode { activation, codes } | OpCase::E2m1Decode { activation, codes } => {
            array("codes", codes);
            (file.count, file.activation) = (Some(codes.len()), Some(name_of(*activation).into()));
        }
        OpCase::Swizzle { rows, cols, scales } => {
            array("scales", scales);
            (file.rows, file.cols) = (Some(*rows), Some(*cols));
        }
        OpCase::Mma { activation, a, b, c } => {
            array("a", bytemuck::cast_slice(a));
            array("b", bytemuck::cast_slice(b));
            array("c", bytemuck::cast_slice(c));
            (file.count, file.activation) = (Some(c.len()), Some(name_of(*activation).into()));
        }
    }
    file.arrays = arrays;
    file
}

/// Results measured on a GPU: `type, family, a[16], b[16], c, d` a line, separated by tabs, in hexadecimal. All lines have the type of
/// the first; the others are left out, and the comment says how many.
fn parse_golden(text: &str) -> Problem<CaseFile> {
    let mut first = None;
    let (mut a, mut b, mut c, mut expected) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut left_out = 0;
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#') && !line.is_empty()) {
        let wrong = || format!("line {}: type, family, 16 words, 16 words, c and d needed", number + 1);
        let fields: [&str; 6] = line.split('\t').collect::<Vec<_>>().try_into().map_err(|_| wrong())?;
        let format = parse_format("type", Some(fields[0]))?;
        if *first.get_or_insert(format) != format {
            left_out += 1;
            continue;
        }
        for (to, field) in [(&mut a, fields[2]), (&mut b, fields[3])] {
            let words: Option<Vec<u16>> = field.split(' ').map(|word| u16::from_str_radix(word, 16).ok()).collect();
            to.extend(words.filter(|words| words.len() == 16).ok_or_else(wrong)?);
        }
        let word = |text| u32::from_str_radix(text, 16).map_err(|_| wrong());
        c.push(f32::from_bits(word(fields[4])?));
        expected.push(word(fields[5])?);
    }
    let activation = first.ok_or("no line with a product")?;
    let comment = (left_out > 0).then(|| format!("{left_out} lines of another type left out"));
    Ok(CaseFile { case: OpCase::Mma { activation, a, b, c }, expected: Some(expected), comment })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff::{DrawOptions, Family, draw_op};

    fn options() -> DrawOptions {
        let shape = LayerShape { hidden: 96, intermediate: 32, output: 20, experts: 3, top_k: 2 };
        let options = LayerOptions { gating: Gating::SwigluOai { alpha: 1.5, limit: 7.5 }, ..Default::default() };
        DrawOptions { family: Family::Special, shape, tokens: 5, options, biases: true }
    }

    #[test]
    fn files_give_the_same_case_again() {
        for op in Op::ALL {
            let case = draw_op(op, &options(), 3).unwrap();
            let expected = Some(case.on_cpu().unwrap().bits);
            let file = CaseFile { case, expected, comment: Some("text".into()) };
            let again = CaseFile::parse(&file.to_json()).unwrap();
            assert_eq!(again.to_json(), file.to_json(), "{op}");
            assert_eq!(again.case.on_cpu().unwrap(), file.case.on_cpu().unwrap(), "{op}");
        }
    }

    #[test]
    fn orders_of_sums_survive() {
        let order_of = |text: &str| match CaseFile::parse(text).unwrap().case {
            OpCase::Layer(case) => case.options.order,
            other => panic!("{other:?}"),
        };
        for order in Order::ALL {
            let mut draw = options();
            draw.options.order = order;
            let case = draw_op(Op::Nvfp4Layer, &draw, 3).unwrap();
            let file = CaseFile { case, expected: None, comment: None };
            assert_eq!(order_of(&file.to_json()), order);
        }
        let shape = json!({ "hidden": 16, "intermediate": 16, "experts": 2, "top_k": 1 });
        let with = |key: &str, value: Value| {
            let mut file = json!({ "op": "nvfp4_layer", "shape": shape, "tokens": 1 });
            file[key] = value;
            order_of(&file.to_string())
        };
        assert_eq!(with("comment", json!("none")), Order::Seed { split: Split::S4 });
        assert_eq!(with("order", json!("seed")), Order::Seed { split: Split::S4 });
        assert_eq!(with("split", json!(8)), Order::Seed { split: Split::S8 });
        assert_eq!(with("order", json!("decode")), Order::Decode);
    }

    #[test]
    fn arrays_by_hand() {
        let array = |value: Value, element, dims: &[usize], scales| parse_array("a", value, element, dims, scales);
        let codes = json!({ "fill": 1, "set": [[[1, 0], "0xf"], [1, 2]] });
        assert_eq!(array(codes, Element::Code, &[2, 4], None).unwrap(), [0x21, 0x11, 0x1f, 0x11]);
        let floats = array(json!([1.5, "0x7fc00001", "-inf"]), Element::F32, &[3], None).unwrap();
        assert_eq!(cast::<u32>(&floats), [0x3fc0_0000, 0x7fc0_0001, 0xff80_0000]);
        assert_eq!(array(json!({ "hex": "01 80" }), Element::Bf16, &[1], None).unwrap(), [0x01, 0x80]);
        // Two experts of 33 x 2 scales: 128 x 4 bytes each.
        let scales = json!({ "fill": "0x30", "padding": "0x7f", "set": [[[1, 32, 1], "0x08"], [2, "0x09"]] });
        let scales = array(scales, Element::Byte, &[2, 512], Some(Scales { rows: 33, cols: 2, one: 0x38 })).unwrap();
        assert_eq!((scales[0], scales[2], scales[3], scales[512 + 5]), (0x30, 0x09, 0x7f, 0x08));
        assert_eq!(scales.iter().filter(|byte| **byte == 0x30).count(), 2 * 66 - 1);
    }

    #[test]
    fn mistakes_are_named() {
        let layer = |arrays: Value| {
            let shape = json!({ "hidden": 16, "intermediate": 16, "experts": 2, "top_k": 1 });
            json!({ "op": "nvfp4_layer", "shape": shape, "tokens": 1, "arrays": arrays }).to_string()
        };
        let mxfp4 = |hidden: usize, arrays: Value| {
            let shape = json!({ "hidden": hidden, "intermediate": 32, "experts": 2, "top_k": 1 });
            json!({ "op": "mxfp4_layer", "shape": shape, "tokens": 1, "arrays": arrays }).to_string()
        };
        let swiglu = json!({ "gate": [1], "up": [1] });
        let small = json!({ "hidden": 16, "intermediate": 16, "experts": 2, "top_k": 1 });
        CaseFile::parse(&layer(json!({}))).unwrap();
        CaseFile::parse(&mxfp4(32, json!({ "b13": { "fill": 1 } }))).unwrap();
        for (text, needed) in [
            ("{".into(), "not a case file"),
            (json!({ "op": "exp", "arays": {} }).to_string(), "arays"),
            (json!({ "op": "sin" }).to_string(), "sin"),
            (json!({ "op": "exp" }).to_string(), "`x` is missing"),
            (json!({ "op": "exp", "arrays": { "x": { "fill": 1 } } }).to_string(), "`count`"),
            (json!({ "op": "exp", "count": 1e15 as u64, "arrays": { "x": { "fill": 1 } } }).to_string(), "`count`"),
            (json!({ "op": "swizzle", "rows": 1e12 as u64, "cols": 4 }).to_string(), "`rows`"),
            (json!({ "op": "mma_m16n8k16", "arrays": { "a": [1, 2], "b": [], "c": [] } }).to_string(), "`a`"),
            (layer(json!({ "w12": [] })), "w12"),
            (layer(json!({ "topk_ids": [1, 2] })), "`topk_ids` has 2 elements: 1 needed"),
            (layer(json!({ "topk_ids": [1.5] })), "`topk_ids`: 1.5"),
            (layer(json!({ "x": { "hex": "0" } })), "`x`: `hex`"),
            (layer(json!({ "x": { "hex": "00" } })), "`x` has 1 bytes: 32 needed"),
            (layer(json!({ "x": { "base64": "?" } })), "`x`: `base64`"),
            (layer(json!({ "x": { "fil": 1 } })), "`fil`"),
            (layer(json!({ "w13": { "set": [[[2, 0, 0], 1]] } })), "[2,0,0] is outside [2, 32, 16]"),
            (layer(json!({ "w13": { "set": [[0, 16]] } })), "`w13`: 16"),
            (layer(json!({ "s13": { "set": [[[0, 31, 1], 1]] } })), "outside [2, 32, 1]"),
            (layer(json!({ "alpha2": { "set": [5] } })), "`alpha2`: `set`"),
            (layer(json!({ "b2": [1, 2] })), "`b2` has 2 elements: 32 needed"),
            (json!({ "op": "swiglu", "gating": "gelu", "arrays": swiglu }).to_string(), "`gating` is `gelu`"),
            (json!({ "op": "swiglu", "alpha": 1, "arrays": swiglu }).to_string(), "`alpha` belongs"),
            (
                json!({ "op": "swiglu", "gating": "swiglu_oai", "alpha": 1, "arrays": swiglu }).to_string(),
                "`limit` is missing",
            ),
            (json!({ "op": "nvfp4_layer", "shape": small, "order": "fast" }).to_string(), "`order` is `fast`"),
            (
                json!({ "op": "nvfp4_layer", "shape": small, "order": "decode", "split": 4 }).to_string(),
                "`split` belongs",
            ),
            (json!({ "op": "nvfp4_layer", "shape": small, "order": "seed", "split": 3 }).to_string(), "`split` is 3"),
            (mxfp4(32, json!({ "alpha1": { "fill": 1 } })), "`mxfp4_layer` has no array `alpha1`"),
            (mxfp4(48, json!({})), "`hidden` is 48: a multiple of 32"),
        ] {
            let error = CaseFile::parse(&text).err().unwrap_or_else(|| panic!("{text} was read"));
            assert!(error.contains(needed), "{error} lacks {needed}");
        }
        let huge = json!({ "hidden": 1 << 20, "intermediate": 1 << 20, "experts": 4096, "top_k": 1 });
        let huge = json!({ "op": "nvfp4_layer", "shape": huge, "tokens": 1 }).to_string();
        assert!(CaseFile::parse(&huge).unwrap_err().contains("16 GiB"));
    }
}
