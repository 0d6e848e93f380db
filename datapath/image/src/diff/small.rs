//! Small files of the file systems on a disk, by their paths: what a seal looks for before it makes a version.
//!
//! Links are not followed, and the last part of a path may have one `*`. What is no file system that is known is left out; one that is known
//! and cannot be read is told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_block::Device;
use headwater_filesystems::{
    Bytes, Entries, Fault, FileSystem, Node, NodeKind, Partition, Visits, fault, identify,
};

use crate::diff::tree;
use crate::error::ImageError;
use crate::progress::Cancel;
use crate::units::usize_of;

/// The most that is read of a file.
pub const SMALL_FILE_BYTES_MAX: usize = 64 << 10;
/// The most files that are read of a file system.
pub const SMALL_FILES_MAX: usize = 1000;

/// A file that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmallFile {
    /// Its path in its file system.
    pub path: String,
    /// Its contents, up to [`SMALL_FILE_BYTES_MAX`].
    pub contents: Vec<u8>,
}

/// What was found in one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmallFiles {
    /// `partition 1`, `the whole disk`.
    pub place: String,
    /// The files that are there.
    pub files: Vec<SmallFile>,
    /// Why the file system was not read, or not all of it.
    pub unread: Option<String>,
}

/// Reads files of all file systems of a disk that can be read. Damage of the tables of partitions is an error.
pub fn small_files(
    disk: &Arc<dyn Device>,
    paths: &[&str],
    cancel: &Cancel,
) -> Result<Vec<SmallFiles>, ImageError> {
    let mut out = Vec::new();
    for partition in tree::find(disk.as_ref())? {
        cancel.check("the look into file systems")?;
        let (mut files, mut unread) = (Vec::new(), None);
        // Hostile bytes must not end the caller, whatever a crate makes of them.
        let read = catch_unwind(AssertUnwindSafe(|| read_all(disk, &partition, paths, cancel, &mut files)));
        match read.unwrap_or_else(|_| Err(fault("it is damaged"))) {
            Ok(()) => {}
            Err(Fault(why)) => unread = Some(why),
        }
        if !files.is_empty() || unread.is_some() {
            out.push(SmallFiles { place: partition.to_string(), files, unread });
        }
    }
    cancel.check("the look into file systems")?;
    Ok(out)
}

fn read_all(
    disk: &Arc<dyn Device>,
    partition: &Partition,
    paths: &[&str],
    cancel: &Cancel,
    files: &mut Vec<SmallFile>,
) -> Result<(), Fault> {
    if identify(&mut Bytes::new(Arc::new(Arc::clone(disk)), partition))?.is_none() {
        return Ok(());
    }
    let mut tree = tree::open(disk, partition)?;
    let mut visits = tree::visits(cancel);
    for path in paths {
        let found = find(tree.as_mut(), path, &mut visits)?;
        visits.release_to(0);
        for node in found {
            if files.len() >= SMALL_FILES_MAX {
                return Err(fault(format!("it has more than {SMALL_FILES_MAX} files of these names")));
            }
            let len = usize_of(node.size_bytes).min(SMALL_FILE_BYTES_MAX);
            let mut contents = vec![0; len];
            let have = tree.read(&node, 0, &mut contents)?;
            contents.truncate(have);
            files.push(SmallFile { path: String::from_utf8_lossy(&node.path).into_owned(), contents });
        }
    }
    Ok(())
}

/// The files that a path means.
fn find(tree: &mut dyn FileSystem, path: &str, visits: &mut Visits) -> Result<Vec<Node>, Fault> {
    let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let Some(last) = parts.pop() else { return Ok(Vec::new()) };
    let mut directory = tree.root();
    for part in parts {
        let entries = tree.list(&directory, visits)?;
        match entry(entries, part) {
            Some(Node { fault: Some(why), .. }) => return Err(why),
            Some(found) if found.kind == NodeKind::Directory => directory = found,
            _ => return Ok(Vec::new()),
        }
    }
    let entries = tree.list(&directory, visits)?;
    let (start, end) = last.split_once('*').unwrap_or((last, ""));
    let is_meant = |name: &[u8]| match last.contains('*') {
        true => {
            name.len() >= last.len() - 1
                && name.starts_with(start.as_bytes())
                && name.ends_with(end.as_bytes())
        }
        false => name.eq_ignore_ascii_case(last.as_bytes()),
    };
    let mut found = Vec::new();
    for (_, node) in entries.into_iter().filter(|(name, _)| is_meant(name)) {
        match node.fault {
            Some(why) => return Err(why),
            None if node.kind == NodeKind::File => found.push(node),
            None => {}
        }
    }
    Ok(found)
}

/// An entry by its name, whose letters may be of another case where there is none of this: some file systems do not tell them apart.
fn entry(mut entries: Entries, name: &str) -> Option<Node> {
    entries.remove(name.as_bytes()).or_else(|| {
        let same = |other: &Vec<u8>| other.eq_ignore_ascii_case(name.as_bytes());
        entries.into_iter().find(|(other, _)| same(other)).map(|(_, node)| node)
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use headwater_testkit::{ReferenceDisk, ReferenceOptions};

    use super::*;

    fn device(bytes: Vec<u8>) -> Arc<dyn Device> {
        Arc::new(ReferenceDisk::with_contents(bytes, ReferenceOptions::default()))
    }

    fn look(bytes: Vec<u8>, paths: &[&str]) -> Vec<SmallFiles> {
        small_files(&device(bytes), paths, &Cancel::new()).unwrap()
    }

    #[test]
    fn files_of_an_ext4_file_system_are_found_by_their_paths() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, raw) = (dir.path().join("tree"), dir.path().join("disk.raw"));
        std::fs::create_dir_all(tree.join("etc/ssh")).unwrap();
        std::fs::write(tree.join("etc/hostname"), "lab\n").unwrap();
        std::fs::write(tree.join("etc/ssh/ssh_host_rsa_key"), "private").unwrap();
        std::fs::write(tree.join("etc/ssh/ssh_host_key"), "too short for the two ends").unwrap();
        std::fs::write(tree.join("etc/ssh/sshd_config"), "x").unwrap();
        std::os::unix::fs::symlink("hostname", tree.join("etc/machine-id")).unwrap();
        let mut mke2fs = Command::new("/sbin/mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-d"]).args([&tree, &raw]).arg("16M");
        assert!(mke2fs.status().expect("mke2fs (Debian: e2fsprogs)").success());
        let paths = ["/etc/hostname", "/etc/machine-id", "/etc/ssh/ssh_host_*_key", "/none/at/all"];
        let found = look(std::fs::read(&raw).unwrap(), &paths);
        let file = |path: &str, contents: &str| SmallFile { path: path.into(), contents: contents.into() };
        let files = vec![file("/etc/hostname", "lab\n"), file("/etc/ssh/ssh_host_rsa_key", "private")];
        assert_eq!(found, [SmallFiles { place: "the whole disk".into(), files, unread: None }]);
    }

    #[test]
    fn what_is_known_and_not_read_is_told_and_nothing_else() {
        assert_eq!(look(vec![0; 1 << 20], &["/etc/hostname"]), []);
        for (kind, at, mark) in
            [("XFS", 0, &b"XFSB"[..]), ("LUKS", 0, b"LUKS\xba\xbe"), ("Btrfs", 0x1_0040, b"_BHRfS_M")]
        {
            let mut disk = vec![0; 1 << 20];
            disk[at..][..mark.len()].copy_from_slice(mark);
            let found = look(disk, &["/etc/hostname"]);
            assert_eq!(found.len(), 1, "{kind}");
            assert!(found[0].unread.as_ref().unwrap().contains(kind), "{found:?}");
        }
    }
}
