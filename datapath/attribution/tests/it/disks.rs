//! Whole disks: partitions, swap, FAT, NTFS, and what is outside of all of them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use headwater_attribution::{Class, Held};
use headwater_testkit::{output, wait_until};

use crate::image::{BLOCK, Mount, changed, changed_blocks, run, scanned, sync};

const MIB: u64 = 1 << 20;

/// Puts a partition's contents into a disk.
fn put(disk: &File, image: &Path, at: u64) {
    disk.write_all_at(&fs::read(image).unwrap(), at).unwrap();
}

fn made(dir: &Path, name: &str, mib: u64, program: &[&str]) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).unwrap().set_len(mib * MIB).unwrap();
    run(program[0], &[&program[1..], &[path.to_str().unwrap()]].concat());
    path
}

/// Mounts with ntfs-3g while `work` is done.
fn with_ntfs(image: &Path, work: impl FnOnce(&Path)) {
    let at = image.with_extension("mounted");
    fs::create_dir_all(&at).unwrap();
    let mut command = Command::new("ntfs-3g");
    command.args(["-o", "no_detach"]).arg(image).arg(&at).stderr(Stdio::piped());
    let mut child = command.spawn().expect("ntfs-3g is needed (apt-get install ntfs-3g)");
    let is_mounted = || fs::read_to_string("/proc/self/mounts").unwrap().contains(at.to_str().unwrap());
    wait_until("it is mounted", || is_mounted() || child.try_wait().unwrap().is_some());
    work(&at);
    wait_until("it is not busy", || output("mount", Command::new("umount").arg(&at)).status.success());
    assert!(child.wait().unwrap().success());
}

#[test]
fn each_partition_is_read_by_its_own_reader() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ext = made(dir, "ext", 32, &["mke2fs", "-q", "-F", "-t", "ext4"]);
    let swap = made(dir, "swap", 8, &["mkswap"]);
    let fat = made(dir, "fat", 40, &["mkfs.vfat", "-F", "32"]);
    let ntfs = made(dir, "ntfs", 32, &["mkntfs", "-q", "-F", "-Q", "-p", "0", "-H", "0", "-S", "0"]);
    let (before, after) = (dir.join("before"), dir.join("after"));
    let places = [(&ext, 1), (&swap, 33), (&fat, 41), (&ntfs, 81)];
    let file = File::create(&before).unwrap();
    file.set_len(128 * MIB).unwrap();
    let table = "label: gpt\nstart=1MiB,size=32MiB\nstart=33MiB,size=8MiB\nstart=41MiB,size=40MiB\nstart=81MiB,size=32MiB\n\
                 start=113MiB,size=8MiB\n";
    let script = dir.join("table");
    fs::write(&script, table).unwrap();
    let command = format!("sfdisk -q {} < {}", before.to_str().unwrap(), script.to_str().unwrap());
    run("sh", &["-c", &command]);
    places.iter().for_each(|(image, at)| put(&file, image, at * MIB));
    {
        let mount = Mount::new(&ext, "loop");
        fs::write(mount.0.join("swapfile"), vec![5; 2 * MIB as usize]).unwrap();
        fs::write(mount.0.join("kept"), vec![5; MIB as usize]).unwrap();
        sync(&mount.0);
    }
    File::options().write(true).open(&swap).unwrap().write_all_at(&vec![6; MIB as usize], 65536).unwrap();
    {
        let source = dir.join("source");
        let (image, file) = (fat.to_str().unwrap(), source.to_str().unwrap());
        run("mmd", &["-i", image, "::EFI"]);
        fs::write(&source, vec![7; 3 * MIB as usize]).unwrap();
        run("mcopy", &["-i", image, file, "::EFI/a long name.bin"]);
        fs::write(&source, vec![8; MIB as usize]).unwrap();
        run("mcopy", &["-i", image, file, "::gone"]);
        run("mdel", &["-i", image, "::gone"]);
    }
    with_ntfs(&ntfs, |at| {
        fs::write(at.join("pagefile.sys"), vec![9; 4 * MIB as usize]).unwrap();
        fs::create_dir(at.join("Documents")).unwrap();
        fs::write(at.join("Documents/report.doc"), vec![10; MIB as usize]).unwrap();
    });
    fs::copy(&before, &after).unwrap();
    let file = File::options().write(true).open(&after).unwrap();
    places.iter().for_each(|(image, at)| put(&file, image, at * MIB));
    // In a partition without a file system, and behind the last one.
    file.write_all_at(&vec![11; 8192], 114 * MIB).unwrap();
    file.write_all_at(&vec![12; 4096], 124 * MIB).unwrap();
    let blocks = changed_blocks(&before, &after);
    let found = scanned(&after, &changed(&blocks)).unwrap();
    assert_eq!(found.held.total_bytes(), (blocks.len() * BLOCK) as u64);
    let total = |class| found.classes.get(&class).map_or(0, Held::total_bytes);
    // The files of swap, the swap partition, and the page file.
    assert_eq!(total(Class::Swap), 2 * MIB + MIB + 4 * MIB, "{found:#?}");
    assert_eq!((total(Class::Unknown), total(Class::Outside)), (8192, 4096));
    // A changed block of 4 KiB also has clusters beside the file that were free before.
    assert!((MIB..MIB + 8192).contains(&found.free[&3].total_bytes()), "{:?}", found.free);
    let file = |partition, path: &str| {
        let item = found
            .files
            .iter()
            .find(|item| item.partition == partition && item.path.as_deref() == Some(path.as_bytes()));
        item.unwrap_or_else(|| panic!("{path}: {:?}", found.files)).held.total_bytes()
    };
    assert_eq!(file(1, "/kept"), MIB);
    assert_eq!(file(3, "/EFI/a long name.bin"), 3 * MIB);
    assert_eq!(file(4, "/Documents/report.doc"), MIB);
    let kinds: Vec<&str> = found.partitions.iter().map(|partition| &*partition.kind).collect();
    assert_eq!(kinds, ["ext4", "swap space", "FAT", "NTFS", "no known file system"]);
    let sum: u64 = found.partitions.iter().map(|partition| partition.held.total_bytes()).sum();
    assert_eq!(sum + 4096, found.held.total_bytes());
}

#[test]
fn a_disk_without_anything_on_it_is_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    File::create(&disk).unwrap().set_len(8 * MIB).unwrap();
    let found = scanned(&disk, &changed(&[3, 4, 9])).unwrap();
    assert_eq!(found.classes.keys().collect::<Vec<_>>(), [&Class::Unknown]);
    assert_eq!(found.held.total_bytes(), 3 * BLOCK as u64);
}

/// Puts the label and the metadata of LVM2 on a disk: one group with one linear volume in two segments, in extents of 4 MiB.
fn put_lvm(disk: &File, segments: [(u64, u64, u64); 2]) {
    let mut text = "vg0 {\nseqno = 1\nextent_size = 8192\nphysical_volumes {\npv0 {\n\
        id = \"AAAAAA-AAAA-AAAA-AAAA-AAAA-AAAA-AAAAAA\"\npe_start = 2048\n}\n}\nlogical_volumes {\nroot {\n\
        status = [\"READ\", \"WRITE\", \"VISIBLE\"]\n"
        .to_owned();
    for (number, (start, count, first)) in segments.iter().enumerate() {
        text.push_str(&format!(
            "segment{} {{\nstart_extent = {start}\nextent_count = {count}\ntype = \"striped\"\n\
             stripe_count = 1\nstripes = [\n\"pv0\", {first}\n]\n}}\n",
            number + 1
        ));
    }
    text.push_str("}\n}\n}\n");
    let put = |at: u64, bytes: &[u8]| disk.write_all_at(bytes, at).unwrap();
    put(512, b"LABELONE");
    put(512 + 20, &32_u32.to_le_bytes());
    put(512 + 24, b"LVM2 001");
    put(512 + 32, &[b'A'; 32]);
    put(512 + 32 + 40, &MIB.to_le_bytes());
    put(512 + 32 + 72, &4096_u64.to_le_bytes());
    put(4096 + 4, b" LVM2 x[5A%r0N*>");
    put(4096 + 32, &(MIB - 4096).to_le_bytes());
    put(4096 + 40, &512_u64.to_le_bytes());
    put(4096 + 48, &(text.len() as u64).to_le_bytes());
    put(4096 + 512, text.as_bytes());
}

#[test]
fn a_volume_of_lvm_is_read_where_its_extents_are() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("var/log")).unwrap();
    fs::write(tree.join("var/log/large"), vec![5; 11 * MIB as usize]).unwrap();
    fs::write(tree.join("small"), vec![6; 9000]).unwrap();
    let ext = made(dir, "ext", 32, &["mke2fs", "-q", "-F", "-t", "ext4", "-d", tree.to_str().unwrap()]);
    let bytes = fs::read(&ext).unwrap();
    let path = dir.join("disk");
    let disk = File::create(&path).unwrap();
    disk.set_len(128 * MIB).unwrap();
    // The first five extents lie behind the last three.
    put_lvm(&disk, [(0, 5, 10), (5, 3, 2)]);
    let (first, last) = bytes.split_at(20 * MIB as usize);
    disk.write_all_at(first, 41 * MIB).unwrap();
    disk.write_all_at(last, 9 * MIB).unwrap();
    let all = |mib: u32| changed(&(0..mib * 256).collect::<Vec<u32>>());
    let (on_disk, alone) = (scanned(&path, &all(128)).unwrap(), scanned(&ext, &all(32)).unwrap());
    let files = |contents: &headwater_attribution::Contents| -> Vec<(Vec<u8>, u64)> {
        contents.files.iter().filter_map(|it| Some((it.path.clone()?, it.held.total_bytes()))).collect()
    };
    assert_eq!(files(&on_disk), files(&alone));
    assert!(files(&on_disk).contains(&(b"/var/log/large".to_vec(), 11 * MIB)), "{:?}", files(&on_disk));
    let volume = on_disk.partitions.iter().find(|it| it.number == 1001).unwrap();
    assert_eq!((volume.kind.as_str(), volume.held.total_bytes()), ("vg0/root: ext4", 32 * MIB));
    let sum = |class| on_disk.classes.get(&class).map_or(0, Held::total_bytes);
    // What is on no volume.
    assert_eq!(sum(Class::Unknown), 96 * MIB);
    assert_eq!(sum(Class::Free), alone.classes[&Class::Free].total_bytes());
}
