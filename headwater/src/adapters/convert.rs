//! Exports a version in the formats that Headwater has no writer for (dynamic VHD, VHDX, VMDK): qemu-img reads the version over NBD and
//! writes the file. Called by [`super::images`].
//!
//! The version is served on a socket in a temporary directory that no other user can enter, so no raw copy is needed. The file gets its
//! name when it is complete and durable. Until then it has a unique temporary name: if two exports have the same target at the same time,
//! the first to finish creates the file, and the other fails. qemu-img gets an open descriptor instead of a path, because in a directory
//! that others can write to, the path could later lead to another file.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_api::{ExportFormat, ImageVersion, ProblemKind};
use headwater_block::Device;
use headwater_image::partial::{NotPlaced, Partial};
use headwater_image::{ChunkCache, VersionReader};
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_service::backend::{BackendError, TaskControl};
use headwater_store::{Hash, Store};

use crate::adapters::images::image_failed;

/// Memory for chunks of one export.
const CHUNKS_BYTES: u64 = 32 << 20;
/// How often the state of qemu-img is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The target for qemu-img: the open file is its standard input, so the file's name does not matter.
const GIVEN: &str = "/dev/stdin";
/// The most bytes of qemu-img's errors in a message.
const COMPLAINT_MAX_BYTES: u64 = 4096;

/// Writes a version to `target` in a format. Returns the file's size.
pub fn export(
    store: &dyn Store,
    version: &ImageVersion,
    manifest: Hash,
    target: &Path,
    format: ExportFormat,
    control: &TaskControl,
) -> Result<u64, BackendError> {
    let reader = VersionReader::open(store, manifest, ChunkCache::new(CHUNKS_BYTES)).map_err(image_failed)?;
    let private = Private::make()?;
    let socket = private.0.join("export.sock");
    let device: Arc<dyn Device> = reader;
    let server = Server::bind(
        Address::Unix(socket.clone()),
        SingleExport::new(device, version.image.clone()),
        Limits::default(),
    );
    let server = server.map_err(|e| {
        BackendError::new(ProblemKind::Failed, format!("cannot serve the version on {}", socket.display()))
            .because(e)
    })?;
    let failed = |e| BackendError::from_io(format!("cannot write {}", target.display()), e);
    let (partial, file) = Partial::create(target).map_err(failed)?;
    let given = file.try_clone().map_err(failed)?;
    let written = convert(&server.uri().to_string(), given, version.size_bytes, format, control);
    server.stop();
    drop(private);
    written?;
    file.sync_all().map_err(failed)?;
    let size_bytes = file.metadata().map_err(failed)?.len();
    partial.put_in_place(target).map_err(|e| match e {
        NotPlaced::Removed(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let message = format!(
                "cannot write {}: another export has made a file of this name meanwhile",
                target.display()
            );
            BackendError::new(ProblemKind::Conflict, message)
        }
        NotPlaced::Removed(e) => failed(e),
        NotPlaced::Unsynced(e) => {
            let what =
                format!("{} is complete, but was not synced: a power cut may remove it", target.display());
            BackendError::from_io(what, e)
        }
    })?;
    Ok(size_bytes)
}

/// The directory of an export with its socket. Other users can neither guess its name nor enter it.
struct Private(PathBuf);

impl Private {
    fn make() -> Result<Self, BackendError> {
        let dir = std::env::temp_dir().join(format!("headwater-export-{}", uuid::Uuid::new_v4().simple()));
        DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .map_err(|e| BackendError::from_io(format!("cannot make {}", dir.display()), e))?;
        Ok(Self(dir))
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The qemu-img process. Killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn convert(
    uri: &str,
    to: File,
    size_bytes: u64,
    format: ExportFormat,
    control: &TaskControl,
) -> Result<(), BackendError> {
    // Without the option, the size of a VHD is rounded up to cylinders, heads and sectors.
    let (driver, options): (_, &[&str]) = match format {
        ExportFormat::Vhd => ("vpc", &["-o", "subformat=dynamic,force_size=on"]),
        _ => (format.name(), &[]),
    };
    let mut command = Command::new("qemu-img");
    headwater_qemu::without_own_variables(&mut command);
    let child = command
        .args(["convert", "-p", "-f", "raw", "-O", driver])
        .args(options)
        .arg(uri)
        .arg(GIVEN)
        .stdin(to)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut running = Running(child.map_err(|e| missing(format, e))?);
    let permille = Arc::new(AtomicU64::new(0));
    let shown = Arc::clone(&permille);
    let progress = running.0.stdout.take();
    let complaints = running.0.stderr.take();
    let follow = std::thread::spawn(move || progress.into_iter().for_each(|out| follow(out, &shown)));
    let listen = std::thread::spawn(move || {
        let mut text = String::new();
        // Output that is not UTF-8 is ignored.
        let _ = complaints.map(|pipe| pipe.take(COMPLAINT_MAX_BYTES).read_to_string(&mut text));
        text
    });
    let status = loop {
        if control.is_cancelled() {
            return Err(BackendError::new(ProblemKind::Cancelled, "the export was cancelled"));
        }
        control.report(size_bytes / 1000 * permille.load(Ordering::Relaxed), size_bytes);
        match running.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(POLL_INTERVAL),
            Err(e) => return Err(BackendError::from_io("cannot wait for qemu-img", e)),
        }
    };
    // Both threads end with the process. A thread that panicked has reported that itself.
    let _ = follow.join();
    let complaint = listen.join().unwrap_or_default();
    if status.success() {
        control.report(size_bytes, size_bytes);
        return Ok(());
    }
    let full = complaint.contains("No space left") || complaint.contains("File too large");
    let kind = if full { ProblemKind::NoSpace } else { ProblemKind::Failed };
    let why = complaint.trim().replace('\n', "; ");
    Err(BackendError::new(kind, format!("qemu-img could not write the file ({status}): {why}")))
}

/// Reads the progress lines `    (12.34/100%)` of qemu-img.
fn follow(mut out: impl Read, permille: &AtomicU64) {
    let mut piece = [0; 256];
    while let Ok(len @ 1..) = out.read(&mut piece) {
        let text = String::from_utf8_lossy(piece.get(..len).unwrap_or_default()).into_owned();
        let percent = text.rsplit('(').next().and_then(|tail| tail.split('/').next());
        if let Some((whole, rest)) = percent.and_then(|percent| percent.split_once('.'))
            && let (Ok(whole), Ok(tenth)) =
                (whole.parse::<u64>(), rest.get(..1).unwrap_or("x").parse::<u64>())
        {
            permille.store(whole.saturating_mul(10).saturating_add(tenth), Ordering::Relaxed);
        }
    }
}

fn missing(format: ExportFormat, error: std::io::Error) -> BackendError {
    if error.kind() != std::io::ErrorKind::NotFound {
        return BackendError::from_io("cannot run qemu-img", error);
    }
    let message = format!("{} is written by qemu-img, which is not installed", format.name());
    BackendError::new(ProblemKind::Unavailable, message)
        .advise("install it ('apt-get install qemu-utils'), or export to raw or qcow2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exports_socket_is_where_nobody_else_can_look() {
        use std::os::unix::fs::PermissionsExt;

        let (one, two) = (Private::make().unwrap(), Private::make().unwrap());
        assert_ne!(one.0, two.0);
        assert_eq!(one.0.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(one.0.join("export.sock"), "").unwrap();
        let path = one.0.clone();
        drop(one);
        assert!(!path.exists());
    }
}
