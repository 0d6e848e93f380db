//! Reads small files of the file systems on a disk by their paths. A seal reads them before it makes a
//! version.
//!
//! Links are not followed, and the last part of a path may have one `*`. Partitions without a known file
//! system are left out. A known file system that cannot be read is reported, and so is a partition table that
//! cannot be read, because partitions may be missing then.

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

/// The most bytes that are read of a file.
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

/// The result for one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmallFiles {
    /// For example `partition 1`, `the whole disk`.
    pub place: String,
    /// The files that exist.
    pub files: Vec<SmallFile>,
    /// Paths of existing files, whether or not their contents can be read.
    pub present: Vec<String>,
    /// Why the file system was not read, or not completely.
    pub unread: Option<String>,
}

impl SmallFiles {
    fn at(place: String) -> Self {
        Self { place, files: Vec::new(), present: Vec::new(), unread: None }
    }
}

/// Reads files at `paths` in all readable file systems of a disk. Also checks for files at `present` without
/// reading them, because Windows compresses its own files in ways that only Windows can read.
pub fn small_files(
    disk: &Arc<dyn Device>,
    paths: &[&str],
    present: &[&str],
    cancel: &Cancel,
) -> Result<Vec<SmallFiles>, ImageError> {
    let mut out = Vec::new();
    let tables = tree::find_readable(disk.as_ref())?;
    for partition in tables.partitions {
        cancel.check("reading the file systems")?;
        let mut found = SmallFiles::at(partition.to_string());
        // Malicious file systems must not end the process, even if a crate panics on them.
        let read = catch_unwind(AssertUnwindSafe(|| {
            read_all(disk, &partition, (paths, present), cancel, &mut found)
        }));
        if let Err(Fault(why)) = read.unwrap_or_else(|_| Err(fault("it is damaged"))) {
            found.unread = Some(why);
        }
        if !found.files.is_empty() || !found.present.is_empty() || found.unread.is_some() {
            out.push(found);
        }
    }
    if let Some(e) = tables.unread {
        let mut missing = SmallFiles::at("further partitions".to_owned());
        missing.unread = Some(e.to_string());
        out.push(missing);
    }
    cancel.check("reading the file systems")?;
    Ok(out)
}

fn read_all(
    disk: &Arc<dyn Device>,
    partition: &Partition,
    (paths, present): (&[&str], &[&str]),
    cancel: &Cancel,
    out: &mut SmallFiles,
) -> Result<(), Fault> {
    if identify(&mut Bytes::new(Arc::new(Arc::clone(disk)), partition))?.is_none() {
        return Ok(());
    }
    let mut tree = tree::open(disk, partition)?;
    let mut visits = tree::visits(cancel);
    let path_of = |node: &Node| String::from_utf8_lossy(&node.path).into_owned();
    // Checked first, so that an unreadable file does not hide these.
    for path in present {
        let found = find(tree.as_mut(), path, &mut visits)?;
        visits.release_to(0);
        let is_file = |node: &&Node| matches!(node.kind, NodeKind::File | NodeKind::Other);
        out.present.extend(found.iter().filter(is_file).map(path_of));
    }
    for path in paths {
        let found = find(tree.as_mut(), path, &mut visits)?;
        visits.release_to(0);
        for node in found {
            if let Some(why) = node.fault {
                return Err(why);
            }
            if node.kind != NodeKind::File {
                continue;
            }
            if out.files.len() >= SMALL_FILES_MAX {
                return Err(fault(format!("it has more than {SMALL_FILES_MAX} files of these names")));
            }
            let len = usize_of(node.size_bytes).min(SMALL_FILE_BYTES_MAX);
            let mut contents = vec![0; len];
            let have = tree.read(&node, 0, &mut contents)?;
            contents.truncate(have);
            out.files.push(SmallFile { path: path_of(&node), contents });
        }
    }
    Ok(())
}

/// The entries that match a path.
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
    Ok(entries.into_iter().filter(|(name, _)| is_meant(name)).map(|(_, node)| node).collect())
}

/// Finds an entry by its name. If no entry has exactly this name, case is ignored, as on some file systems.
fn entry(mut entries: Entries, name: &str) -> Option<Node> {
    entries.remove(name.as_bytes()).or_else(|| {
        let same = |other: &Vec<u8>| other.eq_ignore_ascii_case(name.as_bytes());
        entries.into_iter().find(|(other, _)| same(other)).map(|(_, node)| node)
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use headwater_block::{ByteRange, IoErrorKind};
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, output, run, wait_until};

    use super::*;

    fn device(bytes: Vec<u8>) -> Arc<dyn Device> {
        Arc::new(ReferenceDisk::with_contents(bytes, ReferenceOptions::default()))
    }

    fn look(bytes: Vec<u8>, paths: &[&str]) -> Vec<SmallFiles> {
        small_files(&device(bytes), paths, &["/Windows/System32/ntoskrnl.exe"], &Cancel::new()).unwrap()
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
        assert_eq!(found, [SmallFiles { files, ..SmallFiles::at("the whole disk".into()) }]);
    }

    /// With CompactOS, Windows stores the contents in another stream and leaves a reparse point.
    #[test]
    fn windows_is_detected_by_a_compressed_kernel_file() {
        let dir = tempfile::tempdir().unwrap();
        let (mount, raw) = (dir.path().join("mnt"), dir.path().join("disk.raw"));
        std::fs::create_dir(&mount).unwrap();
        std::fs::File::create(&raw).unwrap().set_len(16 << 20).unwrap();
        run("ntfs-3g", "mkntfs", &["-qFQ", raw.to_str().unwrap()]);
        run("ntfs-3g", "ntfs-3g", &[raw.to_str().unwrap(), mount.to_str().unwrap()]);
        let system = mount.join("WINDOWS/system32");
        std::fs::create_dir_all(&system).unwrap();
        std::fs::write(system.join("ntoskrnl.exe"), "").unwrap();
        let script = "import os, sys; os.setxattr(sys.argv[1], 'system.ntfs_reparse_data', \
            bytes.fromhex('17000080' '1000' '0000' '01000000' '02000000' '01000000' '00000000'))";
        run("python3-minimal", "python3", &["-c", script, system.join("ntoskrnl.exe").to_str().unwrap()]);
        wait_until("the mount is not busy", || {
            output("mount", Command::new("umount").arg(&mount)).status.success()
        });
        let found = look(std::fs::read(&raw).unwrap(), &["/Windows/System32/ntoskrnl.exe"]);
        let present = vec!["/WINDOWS/system32/ntoskrnl.exe".to_owned()];
        assert_eq!(found, [SmallFiles { present, ..SmallFiles::at("the whole disk".into()) }]);
    }

    #[test]
    fn partitions_behind_an_unreadable_table_are_reported() {
        let mut bytes = vec![0; 1 << 20];
        // An extended partition that begins at sector 1000.
        bytes[446 + 4] = 5;
        bytes[446 + 8..446 + 12].copy_from_slice(&1000u32.to_le_bytes());
        bytes[446 + 12..446 + 16].copy_from_slice(&1000u32.to_le_bytes());
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        let disk = ReferenceDisk::with_contents(bytes, ReferenceOptions::default());
        disk.fail(ByteRange::new(1000 * 512, 512).unwrap(), IoErrorKind::Device);
        let disk: Arc<dyn Device> = Arc::new(disk);
        let found = small_files(&disk, &["/etc/hostname"], &[], &Cancel::new()).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].place == "further partitions" && found[0].unread.is_some(), "{found:?}");
    }

    #[test]
    fn only_known_file_systems_are_reported_as_unread() {
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
