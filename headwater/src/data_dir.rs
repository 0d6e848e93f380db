//! The data directory: the paths of its files, and the lock that only one daemon can hold.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use rustix::fs::OFlags;

use crate::failure::{Locked, invalid};

/// The permission bits that let group and others write.
const OTHERS_WRITE: u32 = 0o022;

/// The directory in the data directory while a restore is in progress. Its presence means that a restore did not end.
pub const RESTORING: &str = "restoring";

/// The layout of a data directory.
#[derive(Clone, Debug)]
pub struct DataDir(PathBuf);

impl DataDir {
    /// The given directory, or the default. A relative path is resolved from the current directory.
    pub fn locate(given: Option<PathBuf>) -> anyhow::Result<Self> {
        let dir = match given {
            Some(dir) => dir,
            None if rustix::process::geteuid().is_root() => system_dir(),
            None => user_data_home()?.join("headwater"),
        };
        let absolute = std::path::absolute(&dir)
            .with_context(|| format!("cannot use '{}' as the data directory", dir.display()))?;
        Ok(Self(absolute))
    }

    /// The data directory of the daemon that a client means: the given one; else the user's own if the socket of a daemon is
    /// there; else that of this host's service, if the host has it; else the user's own.
    pub fn of_daemon(given: Option<PathBuf>) -> anyhow::Result<Self> {
        if given.is_some() || rustix::process::geteuid().is_root() {
            return Self::locate(given);
        }
        let system = Self(system_dir());
        match Self::locate(None) {
            Ok(own) if own.socket().exists() || !system.may_have_socket() => Ok(own),
            Err(error) if !system.may_have_socket() => Err(error),
            _ => Ok(system),
        }
    }

    /// Whether the daemon's socket exists, or cannot be checked without membership in its group.
    fn may_have_socket(&self) -> bool {
        match self.socket().symlink_metadata() {
            Ok(_) => true,
            Err(e) => e.kind() == ErrorKind::PermissionDenied,
        }
    }

    /// Lets members of this process's group reach the socket and the directory for files, but list nothing else.
    pub fn open_to_group(&self) -> anyhow::Result<()> {
        let (socket, exchange) = (self.socket(), exchange(&self.0));
        let open = |path: &Path, mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, permissions)
                .with_context(|| format!("cannot let the group use {}", path.display()))
        };
        if !exchange.is_dir() {
            let failed = || format!("cannot make {}", exchange.display());
            std::fs::create_dir(&exchange).with_context(failed)?;
        }
        open(&exchange, 0o770)?;
        open(&socket, 0o660)?;
        open(&self.0, 0o710)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.0.join("api.sock")
    }

    /// The socket of the disk process.
    pub fn disks_socket(&self) -> PathBuf {
        self.0.join("disks.sock")
    }

    /// The socket of the keeper of disks, for new programs.
    pub fn keeper_socket(&self) -> PathBuf {
        self.0.join("keeper.sock")
    }

    /// The lock of that process.
    pub fn disks_lock(&self) -> PathBuf {
        self.0.join("disks.lock")
    }

    /// The token of the default client over TCP.
    pub fn token(&self) -> PathBuf {
        self.0.join("api.token")
    }

    /// The database.
    pub fn database(&self) -> PathBuf {
        self.0.join("headwater.db")
    }

    /// The store of images.
    pub fn store(&self) -> PathBuf {
        self.0.join("store")
    }

    /// Where a tmpfs for the memory of write caches may be mounted.
    pub fn memory(&self) -> PathBuf {
        self.0.join("memory")
    }

    /// Overflow files of write caches.
    pub fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }

    /// The directory of kernels for machines that boot from the network, and of the hashes of these machines' tokens.
    pub fn boot(&self) -> PathBuf {
        self.0.join("boot")
    }

    /// The directory of the daemon's self-signed certificate and its key.
    pub fn tls(&self) -> PathBuf {
        self.0.join("tls")
    }

    /// The directory of the keys of persistent write caches.
    pub fn keys(&self) -> PathBuf {
        self.0.join("keys")
    }

    /// The directory of recordings of the machines' disk requests.
    pub fn recordings(&self) -> PathBuf {
        self.0.join("recordings")
    }

    /// The directory of the machines' sockets, logs and seed disks.
    pub fn run(&self) -> PathBuf {
        self.0.join("run")
    }

    /// The identity of this daemon towards others that share its store: 32 hexadecimal digits, created once. The
    /// caller holds the directory's lock.
    pub fn identity(&self) -> anyhow::Result<String> {
        let path = self.0.join("daemon.id");
        let failed = || format!("cannot use {}", path.display());
        let odd = || {
            let message = format!("{} does not hold 32 hexadecimal digits", path.display());
            let advice = "restore the file, or remove it so that a new one is created";
            anyhow::Error::new(Problem::new(ProblemKind::Damaged, message).advise(advice))
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let digits = text.trim_end();
                let is_sound = digits.len() == 32 && digits.bytes().all(|c| c.is_ascii_hexdigit());
                return is_sound.then(|| digits.to_owned()).ok_or_else(odd);
            }
            Err(e) if e.kind() == ErrorKind::InvalidData => return Err(odd()),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(failed),
        }
        // Written under another name first, so that the file is complete if it exists.
        let new = self.0.join("daemon.id.new");
        let id = uuid::Uuid::new_v4().simple().to_string();
        let mut options = File::options();
        let mut file =
            options.write(true).create(true).truncate(true).mode(0o600).open(&new).with_context(failed)?;
        writeln!(file, "{id}").and_then(|()| file.sync_all()).with_context(failed)?;
        std::fs::rename(&new, &path).with_context(failed)?;
        File::open(&self.0).and_then(|dir| dir.sync_all()).with_context(failed)?;
        Ok(id)
    }

    /// Creates the directory if it does not exist, for its owner only, and takes its lock. Fails if another user could
    /// put files there that the daemon would trust, such as a database, keys or a link.
    pub fn lock(&self) -> anyhow::Result<DataDirLock> {
        let failed = || format!("cannot use the data directory {}", self.0.display());
        if self.0.exists() && !self.0.is_dir() {
            return Err(anyhow::Error::new(std::io::Error::from(ErrorKind::NotADirectory)).context(failed()));
        }
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&self.0).with_context(failed)?;
        self.check_owner(rustix::process::geteuid().as_raw()).with_context(failed)?;
        if self.0.join(RESTORING).exists() {
            let why = "a restore of it did not end, so it is not complete";
            let advice = "remove what is in it (not 'store' and 'cache'), and restore again";
            return Err(
                anyhow::Error::new(Problem::new(ProblemKind::Conflict, why).advise(advice)).context(failed())
            );
        }
        let path = self.0.join("lock");
        let no_follow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(no_follow);
        let opened = options.open(&path).with_context(|| format!("cannot open {}", path.display()));
        let mut file = opened.with_context(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // The holder is only for the message.
                let _ = file.read_to_string(&mut holder);
                let data_dir = self.0.display().to_string();
                return Err(Locked { data_dir, holder: holder.trim().to_owned() }.into());
            }
            Err(TryLockError::Error(e)) => return Err(e).with_context(failed),
        }
        file.set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| write!(file, "{}", std::process::id()))
            .with_context(failed)?;
        // Not the store: if the start fails because the store is missing, an empty directory here would receive a
        // moved store as a subdirectory.
        for dir in [self.cache(), self.run()] {
            builder.create(&dir).with_context(failed)?;
        }
        Ok(DataDirLock { _file: file })
    }

    /// Creates the store's directory if it does not exist, for its owner only. The caller holds the directory's lock.
    pub fn make_store(&self) -> anyhow::Result<()> {
        let (dir, mut builder) = (self.store(), std::fs::DirBuilder::new());
        builder.recursive(true).mode(0o700);
        builder.create(&dir).with_context(|| format!("cannot make the store {}", dir.display()))
    }

    fn check_owner(&self, user: u32) -> anyhow::Result<()> {
        let refused = |why: String, advice: &str| -> anyhow::Result<()> {
            let advice = format!("{advice}, or choose another directory with --data-dir");
            Err(Problem::new(ProblemKind::Invalid, why).advise(advice).into())
        };
        let found = self.0.metadata()?;
        if found.uid() != user {
            let why = format!("it belongs to user {}, but this process runs as user {user}", found.uid());
            return refused(
                why,
                "run it as that user, or, if its files are yours, change their owner to this user (chown -R)",
            );
        }
        if found.mode() & OTHERS_WRITE != 0 {
            let why = format!("others can write to it (mode {:o})", found.mode() & 0o7777);
            return refused(why, "check its files, then remove that permission (chmod go-w)");
        }
        Ok(())
    }
}

/// The owner of a data directory, if it is not the current user.
pub fn other_owner(data_dir: &Path) -> Option<u32> {
    let owner = data_dir.metadata().ok()?.uid();
    (owner != rustix::process::geteuid().as_raw()).then_some(owner)
}

/// The directory in which a daemon and members of its group pass files to each other.
pub fn exchange(data_dir: &Path) -> PathBuf {
    data_dir.join("exchange")
}

/// The lock of the data directory. The kernel releases it when the process ends.
#[derive(Debug)]
pub struct DataDirLock {
    _file: File,
}

/// The data directory of the systemd service.
fn system_dir() -> PathBuf {
    crate::config::system_data_dir().unwrap_or_else(|| PathBuf::from("/var/lib/headwater"))
}

fn user_data_home() -> anyhow::Result<PathBuf> {
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share"))).ok_or_else(|| {
        invalid("neither XDG_DATA_HOME nor HOME is set: name a data directory with --data-dir")
    })
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn a_second_owner_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::locate(Some(dir.path().join("deep/data"))).unwrap();
        let held = data_dir.lock().unwrap();
        let error = data_dir.lock().unwrap_err();
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        assert_eq!(data_dir.identity().unwrap(), data_dir.identity().unwrap());
        std::fs::write(dir.path().join("deep/data/daemon.id"), "").unwrap();
        assert!(data_dir.identity().unwrap_err().to_string().contains("daemon.id"));
        drop(held);
        let _held = data_dir.lock().unwrap();
        assert!(!data_dir.store().exists());
        data_dir.make_store().unwrap();
        data_dir.make_store().unwrap();
        assert_eq!(data_dir.store().metadata().unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_have_or_can_write_to_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::locate(Some(dir.path().to_owned())).unwrap();
        let user = rustix::process::geteuid().as_raw();
        data_dir.check_owner(user).unwrap();
        let refused = data_dir.check_owner(user + 1).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("belongs to user {user}, ")) && refused.contains("chown"),
            "{refused}"
        );
        for (mode, is_refused) in [(0o1777, true), (0o770, true), (0o757, true), (0o755, false)] {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            let locked = data_dir.lock();
            assert_eq!(locked.is_err(), is_refused, "{mode:o}");
            let told = locked.err().map(|e| format!("{e:#}"));
            assert!(told.as_ref().is_none_or(|told| told.contains("others can write")), "{told:?}");
        }
    }

    #[test]
    fn a_lock_that_is_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let precious = dir.path().join("precious");
        std::fs::write(&precious, "mine").unwrap();
        std::os::unix::fs::symlink(&precious, dir.path().join("lock")).unwrap();
        let error = DataDir::locate(Some(dir.path().to_owned())).unwrap().lock().unwrap_err();
        assert!(format!("{error:#}").contains("lock"), "{error:#}");
        assert_eq!(std::fs::read(&precious).unwrap(), b"mine");
    }
}
