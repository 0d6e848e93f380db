//! Replaces files atomically: after a crash there is the old or the new file, never a partial one.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file with these contents at `path`, replacing a file or link there (a link is not followed). It
/// is durable when this returns. Of several concurrent calls the last one wins. `mode` is the permissions of the new
/// file, minus the umask.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    check(path)?;
    // A unique name, because processes of other containers may use the same directory. A process that dies here
    // leaves the temporary file, which is never read.
    let new = path.with_file_name(format!(".headwater-{}.new", uuid::Uuid::new_v4().simple()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if let Err(error) = written.and_then(|()| std::fs::rename(&new, path)) {
        // Ignored, because the error of the write matters.
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

/// Fails for a device, a pipe or a directory, and for a link to a stream of this process (`/dev/stdout`), because
/// root could replace it, and the host would lack it.
fn check(path: &Path) -> std::io::Result<()> {
    let is_stream = std::fs::read_link(path).is_ok_and(|target| target.starts_with("/proc"));
    if path.file_name().is_none() || is_stream || std::fs::metadata(path).is_ok_and(|found| !found.is_file())
    {
        let why = "it is not a regular file, and would be replaced by one";
        return Err(Error::new(ErrorKind::InvalidInput, why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("note");
        replace(&path, b"old", 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let mut old = File::open(&path).unwrap();
        replace(&path, b"new", 0o600).unwrap();
        // The old file stays untouched until the new one is complete.
        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), std::fs::read(&path).unwrap().as_slice()), ("old", b"new".as_slice()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::fs::create_dir(dir.path().join("a")).unwrap();
        assert!(replace(&dir.path().join("a"), b"", 0o600).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn only_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, stream) = (dir.path().join("socket"), dir.path().join("stream"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink("/proc/self/fd/1", &stream).unwrap();
        std::os::unix::fs::symlink(&socket, dir.path().join("link")).unwrap();
        for name in ["socket", "stream", "link"] {
            let error = replace(&dir.path().join(name), b"", 0o600).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name}: {error}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
        // A link to a file, or to nothing, is replaced.
        std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
        replace(&dir.path().join("dangling"), b"", 0o600).unwrap();
    }

    #[test]
    fn of_several_writers_each_has_a_file_of_its_own_until_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("note");
        let text = |writer: u8| vec![writer; 1000 * usize::from(writer)];
        std::thread::scope(|scope| {
            for writer in 1..=4 {
                let path = &path;
                scope.spawn(move || (0..50).for_each(|_| replace(path, &text(writer), 0o600).unwrap()));
            }
        });
        let there = std::fs::read(&path).unwrap();
        assert!((1..=4).any(|writer| there == text(writer)), "{} bytes", there.len());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
