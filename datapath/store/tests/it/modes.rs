//! The permissions of a store's files. The tests start child processes because a process has only one umask.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use headwater_store::{Access, LocalDir, NewVersion, Store};
use headwater_testkit::test_name;

/// The directory in which the child process creates its store.
const PLACE: &str = "HEADWATER_TEST_STORE";

/// The note of the version that the child process publishes.
const NOTE: &str = "HEADWATER_TEST_NOTE";

fn publish(store: &LocalDir, note: &str) {
    let mut publication = store.publish().unwrap();
    publication.append(note.as_bytes()).unwrap();
    let (id, _) = publication.finish_object().unwrap().unwrap();
    // Long enough for a hash tree.
    let manifest = note.as_bytes().repeat(100_000);
    let new = NewVersion {
        name: &"debian".parse().unwrap(),
        manifest: &manifest,
        objects: &[id],
        size_bytes: 4096,
        created_at_s: 1,
        source: "",
        note,
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    let version = publication.commit(new).unwrap().version;
    store.set_trace(version.manifest, Some(b"a trace")).unwrap();
}

/// The distinct modes of the directories and of the files.
fn modes_in(root: &Path) -> (Vec<u32>, Vec<u32>) {
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let dirs = ["images", "manifests", "objects", "traces", "trees"].map(|dir| root.join(dir));
    // Without the file `store`: everybody who can read the root may learn the chunk size.
    let mut files = Vec::new();
    for dir in &dirs {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| mode(&entry.unwrap().path()));
        files.extend(entries);
    }
    assert!(files.len() >= 8, "one image, two versions");
    let mut dirs: Vec<u32> = dirs.iter().map(|dir| mode(dir)).collect();
    dirs.dedup();
    files.sort_unstable();
    files.dedup();
    (dirs, files)
}

#[test]
fn a_store_is_private_until_it_is_opened_and_then_stays_open() {
    if let Some(place) = std::env::var_os(PLACE) {
        let store = LocalDir::open(Path::new(&place), Access::WRITE).unwrap();
        return publish(&store, &std::env::var(NOTE).unwrap());
    }
    let dir = tempfile::tempdir().unwrap();
    let publish_in = |root: &Path, note: &str| {
        let test = std::env::current_exe().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(test);
        let this = test_name(a_store_is_private_until_it_is_opened_and_then_stays_open);
        command.args(["--exact", this]).env(PLACE, root).env(NOTE, note);
        assert!(command.output().unwrap().status.success());
    };
    for (mode, who, opened) in [(0o755, "go+rX", (0o755, 0o644)), (0o750, "g+rX", (0o750, 0o640))] {
        let root = dir.path().join(format!("{mode:o}"));
        // The root is a mount, or was created by the system for a service. That does not mean that others may
        // read the files of the store.
        std::fs::create_dir(&root).unwrap();
        std::fs::set_permissions(&root, PermissionsExt::from_mode(mode)).unwrap();
        publish_in(&root, "one");
        publish_in(&root, "two");
        assert_eq!(modes_in(&root), (vec![0o700], vec![0o600]), "{mode:o}");
        assert!(Command::new("chmod").args(["-R", who]).arg(&root).status().unwrap().success());
        publish_in(&root, "three");
        let (dirs, files) = modes_in(&root);
        assert_eq!((dirs, files), (vec![opened.0], vec![opened.1]), "{mode:o}");
    }
    // A store without traces and trees so far. They have directories of their own.
    let root = dir.path().join("own");
    publish_in(&root, "one");
    for dir in ["traces", "trees"] {
        std::fs::remove_dir_all(root.join(dir)).unwrap();
    }
    assert!(Command::new("chmod").args(["-R", "go+rX"]).arg(&root).status().unwrap().success());
    publish_in(&root, "two");
    publish_in(&root, "one");
    assert_eq!(modes_in(&root).0, [0o755]);
}
