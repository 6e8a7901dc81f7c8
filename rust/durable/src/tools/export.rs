//! Exports a data directory as one safetensors file, with each tensor whole and under its name.

use crate::files::io::{failed, sync_directory};
use crate::files::names::UNFINISHED_SUFFIX;
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::snapshot::safetensors::{Layout, TensorDigest};
use crate::tools::source::{Reading, Source, Tensor};
use crate::tools::target::parent;
use fastps_core::error::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// The result of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Irregularities and omissions, one sentence each.
    pub notes: Vec<String>,
}

/// Writes a safetensors file with every tensor of `source` and, with `state`, every slot of its optimizer
/// (`name.slot`), with the SHA-256 of each in the metadata. The file appears when it is durable.
pub fn export(source: &Path, file: &Path, state: bool, reading: Reading) -> Result<Exported> {
    let taken = |why: String| Err(Error::new(Kind::Config, why).expected("a new file", file.display()));
    if file.exists() {
        return taken(format!("{} already exists", file.display()));
    }
    let Some(name) = file.file_name() else {
        return taken(format!("{} is not a file name", file.display()));
    };
    let mut unfinished = name.to_owned();
    unfinished.push(UNFINISHED_SUFFIX);
    let path = file.with_file_name(&unfinished);
    let source = Source::open(source, reading)?;
    let tensors = source.tensors()?;
    let mut output = Output::create(&path)?;
    let written = write(&tensors, state, &mut output).and_then(|()| {
        let bytes = output.finish()?.bytes;
        std::fs::rename(&path, file).map_err(|error| failed("rename", &path, &error))?;
        sync_directory(parent(file))?;
        Ok(bytes)
    });
    if written.is_err() {
        let _ = remove(&path);
    }
    Ok(Exported { tensors: tensors.len() as u64, bytes: written?, notes: source.notes.clone() })
}

fn write(tensors: &[Tensor<'_>], state: bool, output: &mut Output) -> Result<()> {
    let (mut layout, mut digests) = (Layout::default(), BTreeMap::new());
    for tensor in tensors {
        let spec = &tensor.holding.spec;
        for (part, name) in parts(tensor, state) {
            let name = layout.add(name, spec.shape.clone(), spec.dtype, spec.elements());
            let mut digest = TensorDigest::new(&spec.shape, spec.dtype);
            each(tensor, part, |bytes| {
                digest.update(bytes);
                Ok(())
            })?;
            digests.insert(name, digest.finish());
        }
    }
    layout.add_digests(&digests)?;
    output.write(&layout.header()?)?;
    for tensor in tensors {
        for (part, _) in parts(tensor, state) {
            each(tensor, part, |bytes| output.write(bytes).map(drop))?;
        }
    }
    Ok(())
}

/// The values of a tensor, or a slot of its optimizer.
#[derive(Clone, Copy)]
enum Exportable {
    Values,
    Slot(usize),
}

/// Parts of a tensor in the file, with their names.
fn parts(tensor: &Tensor<'_>, state: bool) -> Vec<(Exportable, String)> {
    let spec = &tensor.holding.spec;
    let slots = spec.optimizer.slots().into_iter().filter(|_| state).enumerate();
    let slots = slots.map(|(slot, name)| (Exportable::Slot(slot), format!("{}.{name}", spec.name)));
    std::iter::once((Exportable::Values, spec.name.to_string())).chain(slots).collect()
}

/// Calls `to` with the bytes of a part, slice by slice. A slice stores its slots consecutively.
fn each(tensor: &Tensor<'_>, part: Exportable, mut to: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    for slice in &tensor.slices {
        let (image, bytes) = (slice.image()?, slice.bytes());
        match part {
            Exportable::Values => to(image.values.as_ref())?,
            Exportable::Slot(slot) => to(&image.state.as_ref()[slot * bytes..(slot + 1) * bytes])?,
        }
    }
    Ok(())
}
