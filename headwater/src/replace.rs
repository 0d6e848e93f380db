//! Files that are replaced as a whole: after a crash there is the old one or the new one, and never half of one.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What is added to the name of a file while it is written; such a file means nothing.
const NEW: &str = ".new";

/// Puts a file with these contents in the place of what is at `path`, if anything; a link there is replaced, and not followed. It
/// is durable when this returns. `mode` is that of the new file, less what the umask takes away.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let mut name = path.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
    name.push(NEW);
    let new = path.with_file_name(name);
    match std::fs::remove_file(&new) {
        // Of whoever died while writing it.
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if let Err(error) = written.and_then(|()| std::fs::rename(&new, path)) {
        // What matters is why it was not written.
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
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
        std::fs::write(dir.path().join("note.new"), "of one that died").unwrap();
        replace(&path, b"old", 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let mut old = File::open(&path).unwrap();
        replace(&path, b"new", 0o600).unwrap();
        // It is another file: the old one was there, untouched, until the new one was whole.
        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), std::fs::read(&path).unwrap().as_slice()), ("old", b"new".as_slice()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::fs::create_dir(dir.path().join("a")).unwrap();
        assert!(replace(&dir.path().join("a"), b"", 0o600).is_err());
        assert!(!dir.path().join("a.new").exists());
    }
}
