//! The holes of an object, as servers report them: lists that are damaged, missing or changing, and which
//! reads wait for them.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::holes::{
    KEPT, OWN, check_copy, common, copied, found_wrong, free_parts, list_of, listed, put_list, two_stores,
    with_versions,
};
use crate::support::{
    Answers, OBJECT_BYTES, all_up, before, limits, object, open, open_urls, status, store, until,
};
use headwater_remote::{Limits, ServerState};
use headwater_store::{Access, Hash, LocalDir, Store, StoreErrorKind};
use headwater_testkit::{FileServer, HttpFault};

#[test]
fn a_list_that_is_damaged_counts_against_its_server() {
    let (dirs, bytes) = two_stores();
    let right = listed(dirs[1].path(), &bytes);
    let list = fs::read(list_of(dirs[0].path(), &bytes)).unwrap();
    let mut damaged = list.clone();
    damaged[60] ^= 1;
    put_list(dirs[0].path(), &bytes, &damaged);
    let [distrusted, mut other] = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let both = open(&[&distrusted, &other]);
    all_up(&both);
    assert_eq!(*object(&both, &bytes).holes().unwrap(), right);
    let status = both.status();
    assert_eq!(both.counters().wrong_answers, 1);
    assert_eq!(status.servers[0].state, ServerState::Aside, "{status:?}");
    // If no other server reports holes, the reader does not conclude that there are none.
    let alone = open(&[&distrusted]);
    let error = found_wrong(&alone, &bytes).holes().unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged);
    let text = error.to_string();
    assert!(text.contains("no server gives holes/") && text.contains("list of holes"), "{text}");
    // What it reports from now on counts if no other server reports anything.
    put_list(dirs[0].path(), &bytes, &list);
    assert_eq!(*object(&both, &bytes).holes().unwrap(), right);
    other.kill();
    assert_eq!(*object(&both, &bytes).holes().unwrap(), listed(dirs[0].path(), &bytes));
}

#[test]
fn lists_in_a_later_format_cause_no_blame() {
    let (dirs, bytes) = two_stores();
    let mut later = fs::read(list_of(dirs[0].path(), &bytes)).unwrap();
    later[8] = 2;
    put_list(dirs[0].path(), &bytes, &later);
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let alone = open(&[&servers[0]]);
    assert_eq!(object(&alone, &bytes).holes().unwrap_err().kind(), StoreErrorKind::UnknownFormat);
    let both = open(&[&servers[0], &servers[1]]);
    all_up(&both);
    assert_eq!(*object(&both, &bytes).holes().unwrap(), listed(dirs[1].path(), &bytes));
    for remote in [alone, both] {
        assert_eq!(remote.counters().wrong_answers, 0);
        assert_eq!(remote.status().servers[0].state, ServerState::Up);
    }
}

/// The answer to a request for a list, chosen by a number: an answer with an error status, a truncated list,
/// or with 0 the list itself.
fn instead_of_lists(which: &Arc<AtomicU64>) -> Arc<Answers> {
    let which = Arc::clone(which);
    Arc::new(move |asked: &str, _: usize| match which.load(Ordering::SeqCst) {
        _ if !asked.contains(" /holes/") => None,
        1 => status(500),
        2 => status(503),
        3 => Some(b"HTTP/1.1 200 x\r\nContent-Length: 160\r\nConnection: close\r\n\r\nHWHOLES\n".to_vec()),
        _ => None,
    })
}

#[test]
fn a_server_without_a_usable_list_keeps_serving_reads() {
    let (dirs, bytes) = two_stores();
    let lists = dirs.each_ref().map(|dir| listed(dir.path(), &bytes));
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let which = Arc::<AtomicU64>::default();
    let remote = open_urls(&[before(&servers[0], instead_of_lists(&which)), servers[1].url()], limits());
    all_up(&remote);
    for answer in [1, 2, 3] {
        which.store(answer, Ordering::SeqCst);
        assert_eq!(*object(&remote, &bytes).holes().unwrap(), lists[1], "{answer}");
        let server = &remote.status().servers[0];
        assert_eq!((server.state, server.failures), (ServerState::Up, 0), "{server:?}");
    }
    which.store(0, Ordering::SeqCst);
    assert_eq!(*object(&remote, &bytes).holes().unwrap(), common(&lists));
}

#[test]
fn after_wrong_bytes_a_read_waits_for_the_only_list() {
    let (dirs, bytes) = two_stores();
    let one = listed(dirs[0].path(), &bytes);
    let server = FileServer::start(dirs[0].path(), None);
    let which = Arc::<AtomicU64>::default();
    let long = Limits { wait_for_better: Duration::from_secs(60), ..limits() };
    let url = [before(&server, instead_of_lists(&which))];
    let remote = open_urls(&url, long);
    let kinds = [StoreErrorKind::Io, StoreErrorKind::Unreachable, StoreErrorKind::Io];
    for (answer, kind) in [1, 2, 3].into_iter().zip(kinds) {
        which.store(answer, Ordering::SeqCst);
        let fail_fast = remote.fail_fast().unwrap();
        let fails = fail_fast.open_object_of(Hash::of(&bytes), OBJECT_BYTES as u64).unwrap();
        assert_eq!(fails.holes().unwrap_err().kind(), kind, "{answer}");
        // Other calls do not wait for it.
        assert!(object(&remote, &bytes).holes().unwrap().is_empty());
        let waits = found_wrong(&remote, &bytes);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waits.holes());
            until(&remote, "it waits", || remote.status().waiting != 0);
            which.store(0, Ordering::SeqCst);
            assert_eq!(*waiting.join().unwrap().unwrap(), one, "{answer}");
        });
    }
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
    // A list that the server never gives is an error in the end.
    which.store(1, Ordering::SeqCst);
    let remote = open_urls(&url, limits());
    let error = found_wrong(&remote, &bytes).holes().unwrap_err();
    assert!(error.kind() == StoreErrorKind::Io && error.to_string().contains("500"), "{error}");
}

#[test]
fn a_copy_does_not_wait_for_a_list_if_a_cache_has_the_whole_object() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, bytes) = with_versions(from.path(), OWN[0]);
    let server = FileServer::start(from.path(), None);
    // A cache answers this if the server behind it is away.
    let no_list = |asked: &str, _: usize| status(504).filter(|_| asked.contains(" /holes/"));
    let remote = open_urls(&[before(&server, Arc::new(no_list))], limits());
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    assert!(fs::read(to.path().join("objects").join(Hash::of(&bytes).to_string())).unwrap() == bytes);
    let status = remote.status();
    assert_eq!((status.servers[0].state, status.servers[0].failures), (ServerState::Up, 0), "{status:?}");
    assert_eq!((remote.counters().wrong_answers, remote.counters().waits), (0, 0));
}

#[test]
fn a_copy_is_correct_although_the_list_was_unknown_at_first() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let server = FileServer::start(dirs[0].path(), None);
    for first in [500, 503, 504] {
        let asked_before = AtomicU64::new(0);
        let answer = move |asked: &str, _: usize| {
            let is_first = asked.contains(" /holes/") && asked_before.fetch_add(1, Ordering::SeqCst) == 0;
            status(first).filter(|_| is_first)
        };
        let remote = open_urls(&[before(&server, Arc::new(answer))], limits());
        let to = to.path().join(first.to_string());
        let copied = copied(&remote, &bytes, &to);
        assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
        check_copy(&to, &bytes, &listed(dirs[0].path(), &bytes), &[KEPT, OWN[0]]);
        let server = &remote.status().servers[0];
        assert_eq!((remote.counters().wrong_answers, server.state), (0, ServerState::Up), "{server:?}");
    }
}

#[test]
fn no_server_is_blamed_while_the_holes_are_unknown() {
    let (dirs, bytes) = two_stores();
    let server = FileServer::start(dirs[0].path(), None);
    let which = Arc::<AtomicU64>::default();
    let remote = open_urls(&[before(&server, instead_of_lists(&which))], limits());
    let source = object(&remote, &bytes);
    let mut times = 0;
    loop {
        which.store(0, Ordering::SeqCst);
        source.holes().unwrap();
        source.read_range(0, &mut vec![0; OBJECT_BYTES]).unwrap();
        which.store(1, Ordering::SeqCst);
        if !source.was_wrong() {
            break;
        }
        times += 1;
        assert!(times < 10, "it is read again and again");
    }
    assert!(times > 1);
    let status = remote.status();
    assert_eq!(
        (remote.counters().wrong_answers, status.servers[0].state),
        (0, ServerState::Up),
        "{status:?}"
    );
}

#[test]
fn after_wrong_bytes_holes_are_requested_uncached() {
    let (dirs, bytes) = two_stores();
    let server = FileServer::start(dirs[0].path(), None);
    let past = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&past);
    let count = move |asked: &str, _: usize| {
        let is_past = asked.contains(" /holes/") && asked.contains("Cache-Control: no-cache");
        counted.fetch_add(u64::from(is_past), Ordering::SeqCst);
        None::<Vec<u8>>
    };
    let remote = open_urls(&[before(&server, Arc::new(count))], limits());
    remote.open_object(Hash::of(&bytes)).unwrap().holes().unwrap();
    assert_eq!(past.load(Ordering::SeqCst), 0);
    remote.open_object_uncached(Hash::of(&bytes)).unwrap().holes().unwrap();
    assert_eq!(past.load(Ordering::SeqCst), 1);
}

#[test]
fn servers_without_a_list_have_the_whole_object() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    // Some servers give this answer for unknown paths.
    for fault in [HttpFault::None, HttpFault::Status(410), HttpFault::Status(403)] {
        let object = object(&remote, &bytes);
        server.fail_all(fault);
        assert!(object.holes().unwrap().is_empty());
        // The list is known now.
        let before = server.requests();
        assert!(object.holes().unwrap().is_empty());
        assert_eq!(server.requests(), before);
    }
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
}

#[test]
fn after_wrong_bytes_a_read_waits_for_missing_servers() {
    let (dirs, bytes) = two_stores();
    let [one, other] = dirs.each_ref().map(|dir| listed(dir.path(), &bytes));
    let [mut a, mut b] = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let remote = open(&[&a, &b]);
    all_up(&remote);
    a.kill();
    let seen = object(&remote, &bytes);
    assert_eq!(*seen.holes().unwrap(), other);
    b.kill();
    let fail_fast = remote.fail_fast().unwrap();
    let fails = fail_fast.open_object_of(Hash::of(&bytes), OBJECT_BYTES as u64).unwrap();
    assert_eq!(fails.holes().unwrap_err().kind(), StoreErrorKind::Unreachable);
    let waits = object(&remote, &bytes);
    assert!(waits.holes().unwrap().is_empty());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| waits.was_wrong());
        until(&remote, "it waits", || remote.status().waiting != 0);
        b.revive();
        assert!(waiting.join().unwrap());
    });
    assert_eq!(*waits.holes().unwrap(), other);
    assert_eq!(remote.counters().waits, 1);
    // The other server has fewer holes, and is back: from now on it must give all of the object, and no
    // server is blamed.
    a.revive();
    all_up(&remote);
    assert!(waits.was_wrong());
    assert_eq!(*waits.holes().unwrap(), one);
    assert_eq!(remote.counters().wrong_answers, 0);
    // Closing ends a wait.
    a.kill();
    b.kill();
    let waits = object(&remote, &bytes);
    assert!(waits.holes().unwrap().is_empty());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            waits.was_wrong();
            waits.read_range(0, &mut [0])
        });
        until(&remote, "it waits", || remote.status().waiting != 0);
        remote.close();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("closed"), "{error}");
    });
}

#[test]
fn an_object_that_gets_holes_while_it_is_read_is_read_once_more() {
    let (dir, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, bytes) = with_versions(dir.path(), OWN[0]);
    let server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    let target = LocalDir::open(to.path(), Access::Copy { new_chunk_bytes: remote.chunk_bytes() }).unwrap();
    let source = object(&remote, &bytes);
    assert!(source.holes().unwrap().is_empty());
    free_parts(&store, &bytes);
    let holes = listed(dir.path(), &bytes);
    // The holes are not known yet, and the bytes that come are not those of the object.
    assert!(source.holes().unwrap().is_empty());
    let mut publication = target.publish().unwrap();
    headwater_store::copy_object(publication.as_mut(), source.as_ref(), &mut |_| Ok(())).unwrap();
    assert_eq!(*source.holes().unwrap(), holes);
    assert_eq!(*target.open_object(Hash::of(&bytes)).unwrap().holes().unwrap(), holes);
    assert_eq!(remote.counters().wrong_answers, 0);
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
}

#[test]
fn a_server_that_freed_space_during_the_read_is_not_blamed() {
    let (dirs, bytes) = two_stores();
    let lists = dirs.each_ref().map(|dir| fs::read(list_of(dir.path(), &bytes)).unwrap());
    let server = FileServer::start(dirs[0].path(), None);
    let remote = open(&[&server]);
    let source = object(&remote, &bytes);
    // A reader finds that the object has wrong bytes. The first time no server is blamed.
    for (list, blamed) in [(&lists[0], 0), (&lists[1], 0), (&lists[1], 1)] {
        source.holes().unwrap();
        source.read_range(0, &mut vec![0; OBJECT_BYTES]).unwrap();
        put_list(dirs[0].path(), &bytes, list);
        assert!(source.was_wrong());
        assert_eq!(remote.counters().wrong_answers, blamed);
    }
}

#[test]
fn reads_from_a_server_with_ever_new_lists_end() {
    let (dirs, bytes) = two_stores();
    let lists = dirs.each_ref().map(|dir| fs::read(list_of(dir.path(), &bytes)).unwrap());
    let server = FileServer::start(dirs[0].path(), None);
    let remote = open(&[&server]);
    let source = object(&remote, &bytes);
    let mut times = 0;
    loop {
        source.holes().unwrap();
        put_list(dirs[0].path(), &bytes, &lists[(times + 1) % 2]);
        if !source.was_wrong() {
            break;
        }
        times += 1;
        assert!(times < 10, "it is read again and again");
    }
    assert!(times > 1);
}
