//! Exports a version as a raw file (bit for bit, with holes where the image has no data), as a fixed VHD,
//! or as a qcow2 image. The file appears under its name only when it is complete and durable.

use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use headwater_store::{Hash, Store};

use crate::chunk_map::read_manifest;
use crate::early_sync::EarlySync;
use crate::error::{ImageError, ImageErrorKind};
use crate::fixed_vhd::FixedVhd;
use crate::manifest::Manifest;
use crate::partial::{NotPlaced, Partial};
use crate::progress::{Cancel, Progress};
use crate::qcow2::writer::Layout;
use crate::reader::open_objects;
use crate::units::usize_of;
use crate::walk::Walk;

/// How many bytes of a qcow2 image's tables are written at a time.
const TABLES_PIECE_BYTES: usize = 1 << 20;

/// Writes the version with this manifest to the raw file `to`, which must not exist. The file gets its name
/// when everything is written and durable. After an error no file is left.
///
/// A process that is killed leaves `.NAME.ID.partial` in the same directory, which can be removed. Of two
/// exports to the same name, the first to finish creates the file, and the other one fails.
pub fn export_raw(
    store: &dyn Store,
    manifest: Hash,
    to: &Path,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), ImageError> {
    export(store, manifest, to, cancel, progress, |_| Ok(Form::Raw)).map(drop)
}

/// As [`export_raw`], to a qcow2 image without compression. Returns the length of the file.
pub fn export_qcow2(
    store: &dyn Store,
    manifest: Hash,
    to: &Path,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<u64, ImageError> {
    export(store, manifest, to, cancel, progress, |manifest| Ok(Form::Qcow2(Layout::new(manifest))))
}

/// As [`export_raw`], to a fixed VHD, in which the disk is padded with zeroes to whole MiB. The file contains
/// the time when the version was made. Returns the length of the file.
pub fn export_fixed_vhd(
    store: &dyn Store,
    manifest: Hash,
    created_at_ms: u64,
    to: &Path,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<u64, ImageError> {
    export(store, manifest, to, cancel, progress, |parsed| {
        let vhd = FixedVhd::new(parsed.size_bytes(), parsed.sector_bytes(), manifest, created_at_ms)?;
        Ok(Form::FixedVhd(Box::new(vhd)))
    })
}

/// The format of the file. Except in a qcow2 image, everything has the same offset as in the image.
enum Form {
    Raw,
    FixedVhd(Box<FixedVhd>),
    Qcow2(Layout),
}

impl Form {
    fn file_bytes(&self, disk_bytes: u64) -> u64 {
        match self {
            Self::Raw => disk_bytes,
            Self::FixedVhd(vhd) => vhd.file_bytes(),
            Self::Qcow2(layout) => layout.file_bytes(),
        }
    }

    /// The offset in the file of chunk number `index`, which has this offset on the disk.
    fn place(&self, index: u64, offset: u64) -> Result<u64, ImageError> {
        match self {
            Self::Raw | Self::FixedVhd(_) => Ok(offset),
            Self::Qcow2(layout) => layout.offset_of(index).ok_or_else(no_place),
        }
    }
}

fn export(
    store: &dyn Store,
    manifest: Hash,
    to: &Path,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
    form: impl FnOnce(&Manifest) -> Result<Form, ImageError>,
) -> Result<u64, ImageError> {
    let _pin = store.pin(manifest)?;
    let opening = |e: ImageError| e.context(format!("cannot export version {}", manifest.short()));
    let parsed = read_manifest(store, manifest, None).map_err(opening)?;
    let form = form(&parsed)?;
    let objects: Vec<_> = open_objects(store, &parsed).map_err(opening)?.into_iter().map(Some).collect();
    let (partial, file) = create_partial(to)?;
    let failed = |e: std::io::Error| {
        ImageError::from_os(format!("cannot write {} (the incomplete file is removed)", to.display()), &e)
    };
    let file_bytes = form.file_bytes(parsed.size_bytes());
    file.set_len(file_bytes).map_err(failed)?;
    if let Form::FixedVhd(vhd) = &form {
        file.write_all_at(&vhd.footer, vhd.data_bytes).map_err(failed)?;
    }
    if let Form::Qcow2(layout) = &form {
        let mut tables = BufWriter::with_capacity(TABLES_PIECE_BYTES, &file);
        for cluster in layout.metadata() {
            cancel.check("the export")?;
            tables.write_all(&cluster).map_err(failed)?;
        }
        tables.flush().map_err(failed)?;
    }

    let chunk_bytes = u64::from(parsed.chunk_bytes());
    let mut done_bytes = hole_bytes(&parsed);
    let total_bytes = parsed.size_bytes();
    progress(Progress { done_bytes, total_bytes });
    let walk = Walk {
        manifest: &parsed,
        objects: &objects,
        is_remote: store.is_remote(),
        round: None,
        cancel,
        what: "export",
    };
    EarlySync::beside(&file, failed, |early| {
        walk.run::<()>(
            |index, _, bytes| {
                let bytes = bytes?;
                let offset = index * chunk_bytes;
                // The last chunk is padded with zeroes that are not part of the image.
                let len = chunk_bytes.min(total_bytes - offset);
                let part = bytes.get(..usize_of(len)).unwrap_or(bytes);
                let place = form.place(index, offset)?;
                file.write_all_at(part, place).and_then(|()| early.wrote(len)).map_err(failed)?;
                Ok(None)
            },
            |chunks, _| {
                done_bytes = done_bytes.saturating_add(chunks * chunk_bytes).min(total_bytes);
                progress(Progress { done_bytes, total_bytes });
            },
        )
    })?;
    cancel.check("the export")?;
    file.sync_all().map_err(failed)?;
    partial.put_in_place(to).map_err(|e| match e {
        NotPlaced::Removed(e) if e.kind() == ErrorKind::AlreadyExists => {
            let why =
                format!("{} was created by another export or another program in the meantime", to.display());
            ImageError::new(ImageErrorKind::Busy, why)
        }
        NotPlaced::Removed(e) => failed(e),
        NotPlaced::Unsynced(e) => {
            let what = format!("{} is completely written, but may be lost in a power cut", to.display());
            ImageError::from_os(what, &e)
        }
    })?;
    Ok(file_bytes)
}

/// Bytes of the image that need not be written.
fn hole_bytes(manifest: &Manifest) -> u64 {
    let data_bytes = manifest.data_chunks() * u64::from(manifest.chunk_bytes());
    manifest.size_bytes().saturating_sub(data_bytes)
}

fn no_place() -> ImageError {
    ImageError::new(ImageErrorKind::Damaged, "a chunk has no place in the qcow2 image")
}

/// Creates the temporary file for the export.
fn create_partial(to: &Path) -> Result<(Partial, File), ImageError> {
    let shown = to.display();
    let invalid =
        |why: &str| ImageError::new(ImageErrorKind::Invalid, format!("cannot export to {shown}: {why}"));
    match fs::metadata(to) {
        Ok(there) if there.is_dir() => return Err(invalid("it is a directory; name a file")),
        Ok(there) if !there.is_file() => {
            return Err(invalid("it is not a regular file; export to a file and copy that"));
        }
        _ => {}
    }
    if to.file_name().is_none() || to.as_os_str().as_bytes().ends_with(b"/") {
        return Err(invalid("it has no file name"));
    }
    // The file may have been created since the caller checked.
    if fs::symlink_metadata(to).is_ok() {
        let why =
            format!("cannot export to {shown}: it exists already; name another file, or remove it first");
        return Err(ImageError::new(ImageErrorKind::Busy, why));
    }
    Partial::create(to).map_err(|e| ImageError::from_os(format!("cannot export to {shown}"), &e))
}
