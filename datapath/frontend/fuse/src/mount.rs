//! Mounts the FUSE file system at a directory: as root with the system call, otherwise through `fusermount3`. Replaces mounts that
//! a dead server left, refuses directories that are in use, and unmounts.

use std::ffi::CString;
use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};

use crate::clone::open_device;
use crate::limits::MAX_TRANSFER_BYTES;
use crate::mounts;

/// File system type in the table of mounts.
const KIND: &str = "fuse.headwater";
/// The program with which unprivileged users mount.
const HELPER: &str = "fusermount3";

/// Why the file cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The name cannot be a file name.
    #[error(
        "cannot offer a file called '{name}': a name has 1 to 255 bytes, none of them '/', and is not '.' or '..'"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// There is no such directory.
    #[error("cannot mount at '{dir}': there is no such directory; create it")]
    NoDirectory {
        /// The directory.
        dir: PathBuf,
    },
    /// The path is not a directory.
    #[error("cannot mount at '{dir}': it is not a directory")]
    NotADirectory {
        /// The path.
        dir: PathBuf,
    },
    /// The directory has files, which would be hidden.
    #[error("cannot mount at '{dir}': there are files in it, which would be hidden; give an empty directory")]
    NotEmpty {
        /// The directory.
        dir: PathBuf,
    },
    /// Another server of this program is mounted there.
    #[error(
        "cannot mount at '{dir}': another headwater offers a disk there; stop it or choose another directory"
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
    /// Another file system whose server has died is mounted there.
    #[error(
        "cannot mount at '{dir}': a file system ({kind}) whose server has died is mounted there; run: umount '{dir}'"
    )]
    ForeignStale {
        /// The directory.
        dir: PathBuf,
        /// Kind of file system.
        kind: String,
    },
    /// The kernel has no FUSE, or a container hides it.
    #[error(
        "cannot mount at '{dir}': FUSE cannot be used: {source}; load the kernel's module (modprobe fuse), or give the container the device /dev/fuse"
    )]
    NoFuse {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Only root may mount, and the helper for other users is missing or failed.
    #[error("cannot mount at '{dir}' without being root: {why}; run as root, or install fuse3")]
    Unprivileged {
        /// The directory.
        dir: PathBuf,
        /// The helper's message, or why it could not run.
        why: String,
    },
    /// Any other error.
    #[error("cannot mount at '{dir}': {source}")]
    System {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// A mounted connection.
pub(crate) struct Mount {
    dir: PathBuf,
    id: Option<u64>,
    is_by_helper: bool,
}

/// How the file system was unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmounted {
    /// No program used it, or it was unmounted before. The connection has ended.
    Cleanly,
    /// Programs still have the file open; they get errors from now on. The connection has ended.
    WhileBusy,
    /// Programs still have the file open, and the connection lasts until they close it.
    Later,
}

impl Mount {
    /// Mounts; returns the descriptor that requests come from.
    pub(crate) fn new(dir: &Path, read_only: bool, allow_other: bool) -> Result<(Self, OwnedFd), MountError> {
        let dir = resolve(dir)?;
        clear_way(&dir)?;
        let is_by_helper = !rustix::process::geteuid().is_root();
        let device = if is_by_helper {
            mount_by_helper(&dir, read_only, allow_other)?
        } else {
            mount_directly(&dir, read_only, allow_other)?
        };
        // Without the table of mounts, our mount cannot be identified; then any mount of this program at the
        // directory is unmounted.
        let id =
            mounts::at(&dir).ok().flatten().filter(|mounted| mounted.kind == KIND).map(|mounted| mounted.id);
        Ok((Self { dir, id, is_by_helper }, device))
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Unmounts, unless the file system was unmounted before, or another one is mounted there now.
    pub(crate) fn unmount(&self) -> std::io::Result<Unmounted> {
        let there = mounts::at(&self.dir)?;
        if there.is_none_or(|mounted| mounted.kind != KIND || self.id.is_some_and(|id| id != mounted.id)) {
            return Ok(Unmounted::Cleanly);
        }
        if self.is_by_helper {
            if run_helper(&self.dir, &["-u", "-q"]).is_ok() {
                return Ok(Unmounted::Cleanly);
            }
            run_helper(&self.dir, &["-u", "-z"]).map_err(std::io::Error::other)?;
            return Ok(Unmounted::Later);
        }
        match rustix::mount::unmount(&self.dir, UnmountFlags::NOFOLLOW) {
            Ok(()) => return Ok(Unmounted::Cleanly),
            Err(Errno::BUSY) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Cuts the connection, and fails with BUSY again; after that the directory can be detached.
        let cut = rustix::mount::unmount(&self.dir, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
        if cut.is_ok() {
            return Ok(Unmounted::WhileBusy);
        }
        rustix::mount::unmount(&self.dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        Ok(Unmounted::WhileBusy)
    }
}

/// The directory's path in the table of mounts, without accessing a file system that may be dead.
fn resolve(dir: &Path) -> Result<PathBuf, MountError> {
    let failed = |source: std::io::Error| match source.kind() {
        ErrorKind::NotFound => MountError::NoDirectory { dir: dir.into() },
        _ => MountError::System { dir: dir.into(), source },
    };
    let dir = std::path::absolute(dir).map_err(failed)?;
    match std::fs::canonicalize(&dir) {
        Ok(dir) => return Ok(dir),
        Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {}
        Err(error) => return Err(failed(error)),
    }
    match (dir.parent(), dir.file_name()) {
        (Some(parent), Some(name)) => Ok(std::fs::canonicalize(parent).map_err(failed)?.join(name)),
        _ => Ok(dir),
    }
}

/// Removes mounts that a dead server left; refuses directories that must not be covered.
fn clear_way(dir: &Path) -> Result<(), MountError> {
    let failed = |source: std::io::Error| MountError::System { dir: dir.into(), source };
    // There may be several, if a dead one was mounted over.
    while let Some(mounted) = mounts::at(dir).map_err(failed)? {
        // Forces a request to the server: the kernel may have cached attributes of a server that has just
        // died.
        let asked = statx(CWD, dir, AtFlags::STATX_FORCE_SYNC, StatxFlags::TYPE);
        let is_dead = matches!(asked, Err(Errno::NOTCONN | Errno::CONNABORTED));
        if mounted.kind != KIND {
            if is_dead {
                return Err(MountError::ForeignStale { dir: dir.into(), kind: mounted.kind });
            }
            break;
        }
        if !is_dead {
            return Err(MountError::InUse { dir: dir.into() });
        }
        if rustix::process::geteuid().is_root() {
            rustix::mount::unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                .map_err(|errno| failed(errno.into()))?;
        } else {
            run_helper(dir, &["-u", "-z"])
                .map_err(|why| MountError::Unprivileged { dir: dir.into(), why })?;
        }
        tracing::info!("fuse: removed the mount that a dead server left at {}", dir.display());
    }
    let metadata = std::fs::metadata(dir).map_err(failed)?;
    if !metadata.is_dir() {
        return Err(MountError::NotADirectory { dir: dir.into() });
    }
    if std::fs::read_dir(dir).map_err(failed)?.next().is_some() {
        return Err(MountError::NotEmpty { dir: dir.into() });
    }
    Ok(())
}

fn mount_directly(dir: &Path, read_only: bool, allow_other: bool) -> Result<OwnedFd, MountError> {
    let device =
        open_device().map_err(|errno| MountError::NoFuse { dir: dir.into(), source: errno.into() })?;
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,max_read={MAX_TRANSFER_BYTES}",
        device.as_raw_fd(),
        uid.as_raw(),
        gid.as_raw()
    );
    if allow_other {
        data.push_str(",allow_other");
    }
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, read_only);
    let data = CString::new(data).unwrap_or_default();
    rustix::mount::mount("headwater", dir, KIND, flags, data.as_c_str()).map_err(|errno| match errno {
        Errno::NODEV => MountError::NoFuse { dir: dir.into(), source: errno.into() },
        _ => MountError::System { dir: dir.into(), source: errno.into() },
    })?;
    Ok(device)
}

/// Runs the helper with a socket, over which it sends the descriptor.
fn mount_by_helper(dir: &Path, read_only: bool, allow_other: bool) -> Result<OwnedFd, MountError> {
    let failed = |errno: Errno| MountError::System { dir: dir.into(), source: errno.into() };
    let refused = |why: String| MountError::Unprivileged { dir: dir.into(), why };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(failed)?;
    let mut options =
        format!("fsname=headwater,subtype=headwater,default_permissions,max_read={MAX_TRANSFER_BYTES}");
    for (is_wanted, option) in [(read_only, ",ro"), (allow_other, ",allow_other")] {
        if is_wanted {
            options.push_str(option);
        }
    }
    // Standard input, because no other descriptor except the outputs can be passed to a child safely.
    let child = Command::new(HELPER)
        .args(["-o", &options, "--"])
        .arg(dir)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| refused(format!("cannot run {HELPER}: {error}")))?;
    let device = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(|error| refused(error.to_string()))?;
    match device.map_err(failed)? {
        Some(device) if output.status.success() => Ok(device),
        _ => Err(refused(last_words(&output.stderr))),
    }
}

fn receive_descriptor(socket: &OwnedFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0_u8];
    let mut parts = [std::io::IoSliceMut::new(&mut byte)];
    recvmsg(socket.as_fd(), &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            return Ok(descriptors.next());
        }
    }
    Ok(None)
}

fn run_helper(dir: &Path, options: &[&str]) -> Result<(), String> {
    let output = Command::new(HELPER).args(options).arg("--").arg(dir).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot run {HELPER}: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(last_words(&output.stderr)) }
}

fn last_words(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let last = text.lines().rfind(|line| !line.trim().is_empty());
    last.map_or_else(|| format!("{HELPER} said nothing"), str::to_owned)
}
