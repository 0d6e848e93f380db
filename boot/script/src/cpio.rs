//! Writes the archives that the Linux kernel unpacks into an initramfs: cpio in the "newc" format.

/// A directory that only its owner may read, write and search.
const DIRECTORY_MODE: u32 = 0o040_700;
/// A file that only its owner may read.
const FILE_MODE: u32 = 0o100_400;
const END: &str = "TRAILER!!!";
/// Archives are padded to a multiple of this, so that another archive can follow.
const BLOCK_BYTES: usize = 512;

/// An archive of files in one directory. They belong to root, and no other user may read them.
pub fn archive(directory: &str, files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    entry(&mut out, 1, DIRECTORY_MODE, directory, &[]);
    for (number, (name, bytes)) in (2..).zip(files) {
        entry(&mut out, number, FILE_MODE, &format!("{directory}/{name}"), bytes);
    }
    entry(&mut out, 0, 0, END, &[]);
    out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
    out
}

fn entry(out: &mut Vec<u8>, number: u32, mode: u32, name: &str, bytes: &[u8]) {
    let links = if mode == DIRECTORY_MODE { 2 } else { 1 };
    // Files are a few KiB long, so their lengths fit. (A longer one would make a broken archive.)
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let name_len = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
    out.extend(b"070701");
    // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
    for field in [number, mode, 0, 0, links, 0, len, 0, 0, 0, 0, name_len, 0] {
        out.extend(format!("{field:08x}").bytes());
    }
    out.extend(name.bytes().chain([0]));
    pad(out);
    out.extend(bytes);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_unpacks_an_archive() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = archive("headwater", &[("token", b"secret"), ("empty", b""), ("odd", &[7; 4097])]);
        assert_eq!(bytes.len() % 512, 0);
        let mut child = Command::new("cpio")
            .args(["--extract", "--make-directories", "--quiet"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("cpio is installed (Debian package cpio)");
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        let file = |name: &str| std::fs::read(dir.path().join("headwater").join(name)).unwrap();
        assert_eq!(
            (file("token"), file("empty"), file("odd")),
            (b"secret".to_vec(), Vec::new(), vec![7; 4097])
        );
        let mode =
            |name: &str| std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("headwater"), mode("headwater/token")), (0o700, 0o400));
    }
}
