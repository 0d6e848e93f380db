//! The scratch disk of a machine: empty at each start, discarded when the machine stops, and never included in a seal, a freeze or a disk
//! export.
//!
//! [`super`] opens it, takes it over from an earlier disk process, and closes it together with the machine's disk. All other operations
//! on the machine's disk ignore it.

use std::path::Path;
use std::sync::Arc;

use headwater_api::{CacheMode, ProblemKind};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
    size,
};
use headwater_service::backend::{BackendError, DiskRequest, Shortage};
use headwater_volume::{Handover, LittleSpace, Volume, VolumeOptions, disk_mode_ram_bytes};
use headwater_writecache::overflow::check_directory;

use super::served::Server;
use super::{Opener, kind_of, volume_mode};

/// The name of the scratch disk's socket in the machine's directory.
pub const SOCKET: &str = "scratch.sock";

/// The fixed part of the space that its write cache may take (see [`disk_bytes`]): for blocks that were overwritten, until
/// their segments are cleaned.
const SPARE_BYTES: u64 = 64 << 20;

/// An empty base: a read-only disk of zeroes.
struct Empty {
    size_bytes: u64,
}

fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "the base of a scratch disk is never written")
}

impl Device for Empty {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size_bytes,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { into, .. } => into.fill(0),
            Op::Flush => {}
            _ => return Err(read_only()),
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { mut buffer, .. } => {
                buffer.fill(0);
                done.complete(Ok(()), buffer);
            }
            Request::Prefetch { .. } | Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

/// How much space its write cache may take: the disk's size, a sixteenth of it, and [`SPARE_BYTES`].
fn disk_bytes(size_bytes: u64) -> u64 {
    size_bytes.saturating_add(size_bytes / 16).saturating_add(SPARE_BYTES)
}

/// Refuses a scratch disk of a size for which a directory has no space now; 0: there is none.
pub(super) fn check_space(cache_dir: &Path, size_bytes: u64) -> Result<(), BackendError> {
    if size_bytes == 0 {
        return Ok(());
    }
    let limit_bytes = disk_bytes(size_bytes);
    check_directory(cache_dir, None, limit_bytes).map_err(|error| {
        let message = format!(
            "the scratch disk of {} may take {} with its write cache, and {} has less free space",
            size::format(size_bytes),
            size::format(limit_bytes),
            cache_dir.display()
        );
        let advice = "free space there, or create the machine with a smaller --scratch";
        BackendError::new(kind_of(&error), message).advise(advice)
    })
}

/// A scratch disk that is open.
pub(super) struct Scratch {
    pub(super) volume: Arc<Volume>,
    server: Server,
}

impl Scratch {
    /// Opens it and serves it on a socket in the machine's directory. With `is_recovered` it takes over the disk in `left`,
    /// and fails if there is none. The result is `None` if the machine has no scratch disk.
    pub(super) fn open(
        opener: &Opener,
        request: &DiskRequest,
        little_space: LittleSpace,
        is_recovered: bool,
        left: Option<Handover>,
    ) -> Result<Option<Self>, BackendError> {
        let size_bytes = request.scratch_bytes;
        if size_bytes == 0 {
            return Ok(None);
        }
        let disk_bytes = disk_bytes(size_bytes);
        let cache_dir = opener.files.cache_dir.clone();
        if little_space == LittleSpace::Refused {
            check_space(&cache_dir, size_bytes)?;
        }
        let options = VolumeOptions {
            name: format!("{}, scratch disk", request.machine),
            base: Arc::new(Empty { size_bytes }),
            mode: volume_mode(CacheMode::Disk),
            ram_bytes: disk_mode_ram_bytes(false),
            weight: request.cache.weight,
            buffering: opener.caches.writing.buffering,
            little_space,
            disk_bytes,
            cache_dir,
            pause_limit: opener.caches.writing.pause_limit(),
            persistent: None,
        };
        if is_recovered && left.is_none() {
            let message = "the memory of its scratch disk was not handed over";
            return Err(BackendError::new(ProblemKind::Damaged, message));
        }
        let failed =
            |e: IoError| BackendError::new(kind_of(&e), "cannot open the machine's scratch disk").because(e);
        let volume = opener.ephemeral(&options, left, failed)?;
        let socket = request.run_dir.join(SOCKET);
        let serial = headwater_qemu::SCRATCH_SERIAL.to_owned();
        let server = super::remove_socket(&socket)
            .and_then(|()| Server::bind(request, &socket, serial, volume.clone(), is_recovered))
            // Another process may still recover what this one cannot serve.
            .inspect_err(|_| if is_recovered { volume.close() } else { super::forget(&volume) })?;
        opener.totals.opened(&volume);
        Ok(Some(Self { volume, server }))
    }

    /// The shortage to report, if its write cache is full.
    pub(super) fn trouble(&self, cache_dir: &Path) -> Option<Shortage> {
        let shortage = self.volume.shortage();
        let is_full = shortage.refusing
            || shortage.waited >= super::shortage::SHORTAGE_AFTER
            || self.server.waiting_writes() > 0;
        is_full.then(|| Shortage {
            message: "the write cache of its scratch disk is full, and writes to it wait".into(),
            advice: format!("free space on the file system of {}", cache_dir.display()),
        })
    }

    /// Serves it no longer.
    pub(super) fn stop(&self) {
        self.server.stop();
    }

    /// Closes and discards it.
    pub(super) fn close(self, totals: &super::Totals) {
        self.volume.end();
        // Writes that wait for space give up, or the server would wait for them.
        self.volume.close();
        self.server.stop();
        totals.closed(&self.volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_disk_without_space_is_refused_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        check_space(dir.path(), 0).unwrap();
        check_space(dir.path(), 4096).unwrap();
        let refused = check_space(dir.path(), 1 << 50).unwrap_err();
        assert_eq!(refused.kind(), headwater_api::ProblemKind::Invalid);
        assert!(refused.to_string().contains("the scratch disk of 1.0 PiB"), "{refused}");
        assert!(refused.advice().is_some_and(|advice| advice.contains("--scratch")));
    }

    #[test]
    fn the_base_of_a_scratch_disk_reads_as_zeroes_and_is_not_written() {
        let disk = Empty { size_bytes: 1 << 20 };
        let range = ByteRange::new(4096, 512).unwrap();
        let mut into = [7; 512];
        assert!(matches!(disk.try_now(Op::Read { range, into: &mut into }), Ok(Attempt::Done)));
        assert_eq!(into, [0; 512]);
        let written = headwater_block::blocking::write(&disk, 4096, &into);
        assert_eq!(written.unwrap_err().kind(), IoErrorKind::ReadOnly);
    }
}
