//! Simulates a power cut before any change on disk. Data that was not synced may or may not have reached the
//! disk.
//!
//! Whenever the store syncs a file (its bytes) or a directory (which names lead to which files), the test
//! records it as durable. At the cut it builds a new directory from these records. Each name leads to the
//! file of the last directory sync or to the present file, chosen at random. An unsynced file has its first
//! bytes or none. A store that answers before it has synced, or renames before it has synced, fails the test.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use headwater_testkit::rounds;
use headwater_testkit::rounds::is_long;
use proptest::prelude::*;

use crate::local_dir::crash_tests::{
    IS_FULL, LEFT, Lists, Operation, apply, check, check_traces, count_steps, ended, lists, operation,
    publish, touched, traces,
};
use crate::local_dir::{Access, LocalDir};

/// What survives a power cut.
#[derive(Default)]
struct Durable {
    /// Contents of files by their number on the file system.
    files: BTreeMap<u64, Vec<u8>>,
    /// Names in directories, and the numbers of the files that they lead to.
    names: BTreeMap<PathBuf, BTreeMap<String, u64>>,
}

thread_local! {
    static DURABLE: RefCell<Option<Durable>> = const { RefCell::new(None) };
}

/// Records that the store has synced this file or directory.
pub(super) fn is_durable(path: &Path) {
    DURABLE.with_borrow_mut(|durable| {
        let Some(durable) = durable else { return };
        if path.is_dir() {
            durable.names.insert(path.to_owned(), names(path));
        } else if let Ok(metadata) = fs::metadata(path) {
            durable.files.insert(metadata.ino(), fs::read(path).unwrap());
        }
    });
}

/// The files in a directory and their numbers. Folders are created once and stay.
fn names(dir: &Path) -> BTreeMap<String, u64> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    files.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().ino())).collect()
}

/// Builds the directory that is found after the power cut.
fn after_the_cut(dir: &Path, durable: &Durable, dice: &mut impl FnMut() -> u64) -> tempfile::TempDir {
    let found = tempfile::tempdir().unwrap();
    for folder in ["", "images", "manifests", "objects", "holes", "traces", "trees", "tmp"] {
        let (from, to) = (dir.join(folder), found.path().join(folder));
        if !from.exists() {
            continue;
        }
        fs::create_dir_all(&to).unwrap();
        let now = names(&from);
        let before = durable.names.get(&from).cloned().unwrap_or_default();
        for name in now.keys().chain(before.keys()).collect::<BTreeSet<_>>() {
            let (now, before) = (now.get(name), before.get(name));
            let number = if dice().is_multiple_of(2) { now } else { before };
            let Some(number) = number else { continue };
            let bytes = match durable.files.get(number) {
                Some(bytes) => bytes.clone(),
                None => {
                    // Never synced: a part of it may exist.
                    let mut bytes = fs::read(from.join(name)).unwrap_or_default();
                    bytes.truncate(usize::try_from(dice() % (bytes.len() as u64 + 1)).unwrap());
                    bytes
                }
            };
            fs::write(to.join(name), bytes).unwrap();
        }
    }
    found
}

/// Runs a history until the power cut at `steps`.
fn run(history: &[Operation], steps: u64, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    DURABLE.set(Some(Durable::default()));
    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    let mut pins = Vec::new();
    let mut before = lists(&store);
    let mut traces_before = traces(&store);
    let mut cut_short = None;
    LEFT.with(|left| left.set(steps));
    for operation in history {
        let _ = apply(&store, operation, &mut pins);
        if ended() {
            cut_short = Some(operation.clone());
            break;
        }
        before = lists(&store);
        traces_before = traces(&store);
    }
    drop((pins, store));
    LEFT.with(|left| left.set(u64::MAX));
    IS_FULL.set(false);
    let durable = DURABLE.take().unwrap();

    let mut rng = headwater_testkit::Rng::new(seed);
    let mut dice = || rng.next_u64();
    let found = after_the_cut(dir.path(), &durable, &mut dice);
    let store = LocalDir::open(found.path(), Access::WRITE).unwrap();
    check(found.path(), &store, true);
    check_traces(&store, &traces_before, cut_short.as_ref());
    let after = lists(&store);
    let touched = cut_short.as_ref().and_then(touched);
    let others = |lists: &Lists| -> Lists {
        lists
            .iter()
            .filter(|(name, _)| Some(*name) != touched.as_ref())
            .map(|(n, i)| (n.clone(), i.clone()))
            .collect()
    };
    assert_eq!(others(&after), others(&before), "a completed change is lost; cut in {cut_short:?}");
    if let Some(name) = &touched
        && let (Some(was), Some(is)) = (before.get(name), after.get(name))
    {
        assert!(is.next_number >= was.next_number);
    }
    publish(&store, 0, 9).unwrap();
    check(found.path(), &store, true);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: u32::try_from(rounds(72)).unwrap(), ..ProptestConfig::default() })]
    #[test]
    fn a_power_cut_anywhere_loses_nothing_that_was_answered(
        history in proptest::collection::vec(operation(), 1..14),
        at in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let steps = count_steps(&history);
        run(&history, at.index(usize::try_from(steps).unwrap() + 1) as u64, seed);
    }
}

/// One history, cut before each of its changes in turn, with several random seeds.
#[test]
fn a_power_cut_before_each_change_in_turn_loses_nothing_that_was_answered() {
    use Operation::{
        Copy, Fill, Promote, Publish, RemoveImage, RemoveVersion, Repair, Revert, SetTrace, Trim,
    };
    let history = [
        Publish { image: 0, content: 1 },
        Publish { image: 0, content: 3 },
        Promote { image: 0, version: 1, channel: true },
        Promote { image: 0, version: 2, channel: true },
        SetTrace { image: 0, version: 3, trace: Some(1) },
        Fill(true),
        Revert { image: 0, channel: true },
        Fill(false),
        Operation::GiveUp { content: 5 },
        RemoveVersion { image: 0, version: 2 },
        Trim,
        Publish { image: 0, content: 3 },
        RemoveVersion { image: 0, version: 1 },
        Trim,
        Publish { image: 1, content: 1 },
        RemoveImage { image: 0 },
        Copy { image: 0, version: 5 },
        Repair { image: 0, version: 5 },
    ];
    let changes = 0..=count_steps(&history);
    if is_long() {
        changes.for_each(|at| (1..3).for_each(|seed| run(&history, at, seed)));
    } else {
        changes.step_by(3).for_each(|at| run(&history, at, 1 + at % 2));
    }
}
