//! What a removal gives back, through the command line: of a daemon's store, and of what was copied from it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::stores::{exported, in_bucket, serve, store, text};
use crate::support::{self, Daemon, pseudo_random};
use headwater_testkit::wait_until;

const DISK_BYTES: usize = 8 << 20;

/// What the data of a store takes on the disk.
fn taken_bytes(store: &Path) -> u64 {
    let entries = std::fs::read_dir(store.join("objects")).unwrap().map(Result::unwrap);
    let blocks = entries.map(|entry| {
        std::fs::File::open(entry.path()).unwrap().sync_all().unwrap();
        entry.metadata().unwrap().blocks()
    });
    blocks.sum::<u64>() * 512
}

fn import(daemon: &Daemon, disk: &[u8]) {
    let raw = daemon.path().join("disk.raw");
    std::fs::write(&raw, disk).unwrap();
    daemon.cli(&["image", "import", text(&raw), "--name", "disk"]).ok();
}

fn is_disk(exported: &Path, disk: &[u8]) {
    assert!(std::fs::read(exported).unwrap() == disk, "{}", exported.display());
    std::fs::remove_file(exported).unwrap();
}

#[test]
fn the_space_of_a_removed_version_comes_back_and_the_others_travel_all_the_same() {
    let daemon = Daemon::start();
    let first = pseudo_random(DISK_BYTES, 1);
    import(&daemon, &first);
    // Three quarters of it are others, in pieces of half a megabyte.
    let mut second = first.clone();
    for (number, piece) in second.chunks_mut(512 << 10).enumerate().filter(|(number, _)| number % 4 > 0) {
        piece.copy_from_slice(&pseudo_random(512 << 10, 100 + number as u64));
    }
    import(&daemon, &second);
    let here = daemon.path().join("store");
    let before = taken_bytes(&here);
    assert!(before > (DISK_BYTES as u64) * 7 / 4, "{before}");

    let removed = daemon.cli(&["--json", "image", "remove", "disk@1"]).ok();
    let removed: serde_json::Value = serde_json::from_str(&removed).unwrap();
    let freed = removed["freed_bytes"].as_u64().unwrap();
    // On a slow machine it goes on behind the command, and its manifest is no object.
    wait_until("its space is back", || taken_bytes(&here) < (DISK_BYTES as u64) * 17 / 16);
    assert!(freed < before - taken_bytes(&here) + 65_536, "{freed} of {before}");
    assert!(daemon.cli(&["image", "verify", "disk@2"]).ok().contains("intact"));
    let out = daemon.path().join("out.raw");
    daemon.cli(&["image", "export", "disk@2", text(&out)]).ok();
    is_disk(&out, &second);

    // To a directory, on to a bucket, from a server of that to a third one.
    let dir = support::short_dir();
    let (copy, third) = (dir.path().join("copy"), dir.path().join("third"));
    let bucket = in_bucket("trimmed");
    store(&["sync", text(&here), text(&copy)]).ok();
    assert!(taken_bytes(&copy) < (DISK_BYTES as u64) * 17 / 16);
    store(&["sync", text(&copy), &bucket]).ok();
    let (_served, url) = serve(&[&bucket, "--listen", "127.0.0.1:0"]);
    store(&["sync", &url, text(&third)]).ok();
    assert_eq!(taken_bytes(&third), taken_bytes(&copy));
    for store_ in [text(&copy), &bucket, text(&third)] {
        assert!(store(&["verify", store_]).ok().contains("disk@2 is intact"), "{store_}");
    }
    assert!(exported(&["disk@2", "--from", &bucket]) == second);
    assert!(exported(&["disk@2", "--from", text(&third)]) == second);

    // What went comes again, and goes to where the rest is.
    import(&daemon, &first);
    daemon.cli(&["image", "export", "disk@3", text(&out)]).ok();
    is_disk(&out, &first);
    for target in [text(&copy), &bucket, text(&third)] {
        assert!(store(&["sync", text(&here), target]).ok().contains("1 versions copied"), "{target}");
        assert!(exported(&["disk@3", "--from", target]) == first, "{target}");
        assert!(exported(&["disk@2", "--from", target]) == second, "{target}");
    }
}
