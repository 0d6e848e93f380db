//! Finds and creates the directories of the control sockets (`PID.sock`) of `headwater export` and `headwater attach`,
//! to which `headwater cache` connects. Refuses a directory in which another user could put a socket. The protocol is
//! in [`super`], its two ends in [`super::client`] and [`super::server`].
//!
//! A socket gets its name only after its process listens on it. So if a socket refuses a connection, its process is
//! dead.

use std::fs::{DirBuilder, Metadata, Permissions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The environment variable that overrides the directory above `caches`.
const VARIABLE: &str = "HEADWATER_RUN_DIR";

/// The prefix of a socket's temporary name before its process listens.
const UNFINISHED: &str = ".new-";

/// The directories in which this user's sockets may be, the preferred one first. There are several, because processes
/// of one user may have been started with and without the environment of a login.
pub fn socket_dirs() -> Vec<PathBuf> {
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path: &PathBuf| path.is_absolute());
    let chosen = std::env::var_os(VARIABLE)
        .filter(|dir| !dir.is_empty())
        .and_then(|dir| std::path::absolute(dir).ok());
    let user = rustix::process::geteuid();
    let number = user.as_raw();
    let mut bases = Vec::new();
    if let Some(dir) = chosen {
        bases.push(dir);
    } else if user.is_root() {
        bases.push(PathBuf::from("/run/headwater"));
    } else {
        let of_login = PathBuf::from(format!("/run/user/{number}"));
        bases.extend(absolute("XDG_RUNTIME_DIR").map(|dir| dir.join("headwater")));
        bases.extend(of_login.is_dir().then(|| of_login.join("headwater")));
        bases.push(PathBuf::from(format!("/tmp/headwater-{number}")));
    }
    bases.dedup();
    bases.into_iter().map(|base| base.join("caches")).collect()
}

/// For root: the directories of all other users, except for those that somebody's `XDG_RUNTIME_DIR` puts elsewhere.
/// Empty for other users, and if `HEADWATER_RUN_DIR` is set.
pub fn of_others() -> Vec<PathBuf> {
    let is_set = std::env::var_os(VARIABLE).is_some_and(|dir| !dir.is_empty());
    if is_set || !rustix::process::geteuid().is_root() {
        return Vec::new();
    }
    others_in(Path::new("/run/user"), Path::new("/tmp"))
}

fn others_in(logins: &Path, tmp: &Path) -> Vec<PathBuf> {
    let is_other = |number: &str| number.parse::<u32>().is_ok_and(|number| number != 0);
    let dirs = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let named = |path: &PathBuf, prefix: &str| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix(prefix).is_some_and(is_other)
    };
    let of_logins = dirs(logins).filter(|path| named(path, "")).map(|dir| dir.join("headwater"));
    let in_tmp = dirs(tmp).filter(|path| named(path, "headwater-"));
    let mut bases: Vec<_> = of_logins.chain(in_tmp).collect();
    bases.sort();
    bases.into_iter().map(|base| base.join("caches")).collect()
}

/// Listens in the first of these directories where that is possible. Returns the path too.
pub fn listen(dirs: &[PathBuf]) -> Result<(UnixListener, PathBuf), Error> {
    let mut failed = Error::from(ErrorKind::NotFound);
    for dir in dirs {
        match listen_in(dir) {
            Ok(listening) => return Ok(listening),
            Err(error) => failed = Error::new(error.kind(), format!("{}: {error}", dir.display())),
        }
    }
    Err(failed)
}

fn listen_in(dir: &Path) -> Result<(UnixListener, PathBuf), Error> {
    if let Some(base) = dir.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(base)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    check(dir, rustix::process::geteuid().as_raw())?;
    sweep(dir);
    let pid = std::process::id();
    let path = dir.join(format!("{pid}.sock"));
    if connect(&path).is_ok() {
        // A process in another container has the same process id there.
        return Err(Error::new(
            ErrorKind::AddrInUse,
            format!("another process listens on {}", path.display()),
        ));
    }
    let unfinished = dir.join(format!("{UNFINISHED}{pid}"));
    let _ = std::fs::remove_file(&unfinished);
    let listener = UnixListener::bind(&unfinished)?;
    std::fs::set_permissions(&unfinished, Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&unfinished, &path))
        .inspect_err(|_| drop(std::fs::remove_file(&unfinished)))?;
    Ok((listener, path))
}

/// The control socket of one `export` or `attach` process.
#[derive(Debug, PartialEq, Eq)]
pub struct Socket {
    /// Its path.
    pub path: PathBuf,
    /// The owner of its directory.
    pub owner: u32,
}

/// The sockets in these directories. Sockets of dead processes of this user are removed. An untrusted directory is
/// an error only if the other directories have no sockets, because anybody can create a directory in `/tmp`.
/// Untrusted directories of `others` are ignored.
pub fn sockets(dirs: &[PathBuf], others: &[PathBuf]) -> Result<Vec<Socket>, Error> {
    let (mut found, mut refused) = (Vec::new(), None);
    for dir in dirs {
        match sockets_in(dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => refused = Some(Error::new(error.kind(), format!("{}: {error}", dir.display()))),
            Ok(mut sockets) => found.append(&mut sockets),
        }
    }
    match refused {
        Some(error) if found.is_empty() => return Err(error),
        _ => found.extend(others.iter().filter_map(|dir| sockets_in(dir).ok()).flatten()),
    }
    Ok(found)
}

/// The sockets in a directory of this user, or for root of anybody.
fn sockets_in(dir: &Path) -> Result<Vec<Socket>, Error> {
    let user = rustix::process::geteuid();
    let owner = if user.is_root() { std::fs::symlink_metadata(dir)?.uid() } else { user.as_raw() };
    check(dir, owner)?;
    // Root removes nothing in other users' directories: the owner could replace the directory at the same moment.
    let paths = if owner == user.as_raw() { sweep(dir) } else { named_sockets(dir) };
    Ok(paths.into_iter().map(|path| Socket { path, owner }).collect())
}

/// Fails if another user could put a socket into the directory, or replace the directory.
fn check(dir: &Path, user: u32) -> Result<(), Error> {
    let refused = |why: &str| Err(Error::new(ErrorKind::PermissionDenied, why.to_owned()));
    let metadata_of = |path: &Path| std::fs::symlink_metadata(path);
    let open_to_others = |metadata: &Metadata, bits: u32| metadata.mode() & bits != 0;
    if let Some(base) = dir.parent() {
        let base = metadata_of(base)?;
        if !base.is_dir() || ![user, 0].contains(&base.uid()) || open_to_others(&base, 0o022) {
            return refused("its parent directory belongs to another user, or others can write to it");
        }
    }
    let metadata = metadata_of(dir)?;
    if !metadata.is_dir() || metadata.uid() != user || open_to_others(&metadata, 0o077) {
        return refused("it is not a directory that belongs to this user with mode 0700");
    }
    Ok(())
}

/// Removes the sockets of dead processes. Returns the other sockets.
fn sweep(dir: &Path) -> Vec<PathBuf> {
    let mut alive = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        if let Some(pid) = name.strip_prefix(UNFINISHED) {
            if !Path::new("/proc").join(pid).exists() {
                let _ = std::fs::remove_file(&path);
            }
        } else if name.ends_with(".sock") {
            match connect(&path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    let _ = std::fs::remove_file(&path);
                }
                _ => alive.push(path),
            }
        }
    }
    alive.sort();
    alive
}

fn named_sockets(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut sockets: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|it| it == "sock")).collect();
    sockets.sort();
    sockets
}

/// Connects without waiting for a process that does not accept.
pub fn connect(path: &Path) -> Result<UnixStream, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    fn paths(dirs: &[PathBuf]) -> Vec<PathBuf> {
        let user = rustix::process::geteuid().as_raw();
        let found = sockets(dirs, &[]).unwrap();
        found.into_iter().inspect(|socket| assert_eq!(socket.owner, user)).map(|socket| socket.path).collect()
    }

    #[test]
    fn a_socket_is_its_owners_only_and_one_of_a_dead_process_is_swept() {
        let base = tempfile::tempdir().unwrap();
        let dirs = [base.path().join("run/caches")];
        assert!(paths(&dirs).is_empty());
        let (listener, path) = listen(&dirs).unwrap();
        assert_eq!((mode(&dirs[0]), mode(&path)), (0o700, 0o600));
        // A socket without a process, as after `kill -9`, and one whose process died before it listened.
        let (dead, half) = (dirs[0].join("4194305.sock"), dirs[0].join(".new-4194305"));
        drop(UnixListener::bind(&dead).unwrap());
        drop(UnixListener::bind(&half).unwrap());
        assert_eq!(paths(&dirs), std::slice::from_ref(&path));
        assert!(!dead.exists() && !half.exists());
        // Our process is alive, so a second one with this id is in another container.
        assert_eq!(listen(&dirs).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(listener);
        assert!(paths(&dirs).is_empty() && !path.exists());
    }

    #[test]
    fn a_directory_that_others_may_use_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let dirs = [base.path().join("run/caches")];
        drop(listen(&dirs).unwrap());
        for (path, bad, good) in [(&dirs[0], 0o750, 0o700), (&base.path().join("run"), 0o777, 0o755)] {
            std::fs::set_permissions(path, Permissions::from_mode(bad)).unwrap();
            assert_eq!(listen(&dirs).unwrap_err().kind(), ErrorKind::PermissionDenied);
            assert_eq!(sockets(&dirs, &[]).unwrap_err().kind(), ErrorKind::PermissionDenied);
            std::fs::set_permissions(path, Permissions::from_mode(good)).unwrap();
        }
        // The next directory is used if the first is unusable.
        let other = base.path().join("other/caches");
        std::fs::set_permissions(&dirs[0], Permissions::from_mode(0o755)).unwrap();
        let (_listener, path) = listen(&[dirs[0].clone(), other.clone()]).unwrap();
        assert!(path.starts_with(other));
    }

    #[test]
    fn directories_of_others_are_found_by_the_numbers_of_users() {
        let base = tempfile::tempdir().unwrap();
        let (logins, tmp) = (base.path().join("logins"), base.path().join("tmp"));
        for name in
            ["logins/1000", "logins/0", "logins/x", "tmp/headwater-7", "tmp/headwater-0", "tmp/headwater-x"]
        {
            std::fs::create_dir_all(base.path().join(name)).unwrap();
        }
        let wanted = [logins.join("1000/headwater/caches"), tmp.join("headwater-7/caches")];
        assert_eq!(others_in(&logins, &tmp), wanted);
        assert!(others_in(&base.path().join("none"), &base.path().join("none")).is_empty());
    }

    #[test]
    fn a_directory_of_others_that_cannot_be_trusted_has_no_sockets() {
        let base = tempfile::tempdir().unwrap();
        let (own, other) = ([base.path().join("run/caches")], [base.path().join("other/caches")]);
        let (_listener, path) = listen(&own).unwrap();
        let (_second, second) = listen(&other).unwrap();
        assert_eq!(sockets(&own, &other).unwrap().len(), 2);
        std::fs::set_permissions(&other[0], Permissions::from_mode(0o755)).unwrap();
        let found = sockets(&own, &other).unwrap();
        assert!(found.len() == 1 && found[0].path == path && second.exists(), "{found:?}");
        assert!(sockets(&[], &other).unwrap().is_empty());
        if rustix::process::geteuid().is_root() {
            // Root sees the sockets of another user, and leaves orphans to their owner.
            let nobody = 65534;
            std::fs::set_permissions(&other[0], Permissions::from_mode(0o700)).unwrap();
            for path in [other[0].parent().unwrap(), &other[0]] {
                std::os::unix::fs::chown(path, Some(nobody), None).unwrap();
            }
            drop(UnixListener::bind(other[0].join("4194305.sock")).unwrap());
            let found = sockets(&own, &other).unwrap();
            assert_eq!(found.iter().map(|socket| socket.owner).collect::<Vec<_>>(), [0, nobody, nobody]);
            assert!(other[0].join("4194305.sock").exists());
        }
    }
}
