//! Who may read the files of a store. Processes of their own: the umask is a process's.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use headwater_store::{Access, LocalDir, NewVersion, Store};

/// Where the process with the umask makes its store.
const PLACE: &str = "HEADWATER_TEST_STORE";

fn publish(store: &LocalDir, note: &str) {
    let mut publication = store.publish().unwrap();
    publication.append(note.as_bytes()).unwrap();
    let (id, _) = publication.finish_object().unwrap().unwrap();
    let new = NewVersion {
        name: &"debian".parse().unwrap(),
        manifest: note.as_bytes(),
        objects: &[id],
        size_bytes: 4096,
        created_at_s: 1,
        source: "",
        note,
        author: "",
        unless_newest: false,
    };
    let version = publication.commit(new).unwrap();
    store.set_trace(version.manifest, Some(b"a trace")).unwrap();
}

#[test]
#[ignore = "run by the test below, with a umask"]
fn makes_a_store() {
    let Some(place) = std::env::var_os(PLACE) else { return };
    let store = LocalDir::open(Path::new(&place), Access::WRITE).unwrap();
    ["one", "two"].iter().for_each(|note| publish(&store, note));
}

/// The modes of directories and of files that are read, each once.
fn modes_in(root: &Path) -> (Vec<u32>, Vec<u32>) {
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let dirs = ["images", "manifests", "objects", "traces"].map(|dir| root.join(dir));
    let mut files = vec![mode(&root.join("store"))];
    for dir in &dirs {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| mode(&entry.unwrap().path()));
        files.extend(entries);
    }
    assert_eq!(files.len(), 8, "one image, two versions");
    let mut dirs: Vec<u32> = dirs.iter().map(|dir| mode(dir)).collect();
    dirs.dedup();
    files.sort_unstable();
    files.dedup();
    (dirs, files)
}

#[test]
fn the_directory_of_a_store_says_who_reads_it_whatever_the_umask() {
    let dir = tempfile::tempdir().unwrap();
    let made = |root: &Path| {
        let test = std::env::current_exe().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(test);
        command.args(["--exact", "makes_a_store", "--ignored"]).env(PLACE, root);
        assert!(command.output().unwrap().status.success());
        modes_in(root)
    };
    for (mode, expected) in [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)] {
        let root = dir.path().join(format!("{mode:o}"));
        std::fs::create_dir(&root).unwrap();
        std::fs::set_permissions(&root, PermissionsExt::from_mode(mode)).unwrap();
        assert_eq!(made(&root), (vec![mode], vec![expected]), "{mode:o}");
    }
    // Nobody else reads what nobody asked to open.
    assert_eq!(made(&dir.path().join("own")), (vec![0o700], vec![0o600]));
}
