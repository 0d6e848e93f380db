//! Several servers have freed different parts of an object. A reader gets every part that at least one of
//! them has.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::holes::{
    KEPT, OWN, check_copy, common, copied, copied_version, found_wrong, free_parts, holes_of_copy, list_of,
    listed, put_list, two_stores, with_versions,
};
use crate::support::{OBJECT_BYTES, all_up, before, limits, object, open, open_urls, read, status, until};
use headwater_remote::{Limits, ServerState};
use headwater_store::{Access, Hash, LocalDir, Store, StoreErrorKind};
use headwater_testkit::{FileServer, HttpFault};

/// So that reads do not prefer this server.
const SLOW: HttpFault = HttpFault::Delay(Duration::from_millis(50));

#[test]
fn a_copy_combines_the_parts_of_all_servers() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let lists = dirs.each_ref().map(|dir| listed(dir.path(), &bytes));
    assert!(common(&lists).bytes() < lists[0].bytes());
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    servers[0].fail_all(SLOW);
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    assert_eq!(*object(&remote, &bytes).holes().unwrap(), common(&lists));
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    check_copy(to.path(), &bytes, &common(&lists), &[KEPT, OWN[0], OWN[1]]);
    // It was read once. The holes neither went over the network nor take space.
    let sent: u64 = servers.iter().map(FileServer::body_bytes).sum();
    assert!(sent < OBJECT_BYTES as u64 / 2, "{sent} bytes");
    let taken = fs::metadata(to.path().join("objects").join(Hash::of(&bytes).to_string())).unwrap();
    assert!(taken.blocks() * 512 < OBJECT_BYTES as u64 / 2, "{} blocks", taken.blocks());
    assert_eq!((remote.counters().wrong_answers, remote.counters().waits), (0, 0));
}

#[test]
fn a_copy_is_whole_where_one_server_has_all_of_it() {
    let [with_holes, all, to] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (store, bytes) = with_versions(with_holes.path(), OWN[0]);
    free_parts(&store, &bytes);
    let (_, same) = with_versions(all.path(), OWN[0]);
    assert!(bytes == same);
    let servers = [&with_holes, &all].map(|dir| FileServer::start(dir.path(), None));
    servers[1].fail_all(SLOW);
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    assert!(object(&remote, &bytes).holes().unwrap().is_empty());
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    assert!(fs::read(to.path().join("objects").join(Hash::of(&bytes).to_string())).unwrap() == bytes);
    assert!(!list_of(to.path(), &bytes).exists());
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn a_copy_continues_from_others_if_a_server_fails() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let other = listed(dirs[1].path(), &bytes);
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    // This server sends the first block, and then breaks off in every longer range.
    servers[0].fail(HttpFault::BreakAfter(10_000));
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    check_copy(to.path(), &bytes, &other, &[KEPT, OWN[1]]);
    let status = remote.status();
    assert!(status.servers.iter().all(|server| server.state != ServerState::Aside), "{status:?}");
}

#[test]
fn a_copy_combines_all_parts_although_a_server_breaks_off() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let lists = dirs.each_ref().map(|dir| listed(dir.path(), &bytes));
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let breaks = AtomicU64::new(2);
    let break_off = move |asked: &str, _: usize| {
        let is_part = asked.contains(" /objects/");
        let breaks = is_part
            && breaks.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        breaks.then(|| b"HTTP/1.1 206 x\r\nContent-Length: 10\r\nConnection: close\r\n\r\n".to_vec())
    };
    let remote = open_urls(&[before(&servers[0], Arc::new(break_off)), servers[1].url()], limits());
    all_up(&remote);
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    check_copy(to.path(), &bytes, &common(&lists), &[KEPT, OWN[0], OWN[1]]);
}

#[test]
fn a_read_with_remembered_lists_uses_servers_that_have_the_part() {
    let (dirs, bytes) = two_stores();
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    servers[0].fail_all(SLOW);
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    // As in a server that serves this store: it keeps objects open, and opens them again for readers that
    // bypass caches.
    let kept = remote.open_object(Hash::of(&bytes)).unwrap();
    object(&remote, &bytes).holes().unwrap();
    let anew = || remote.open_object_uncached(Hash::of(&bytes)).unwrap();
    for own in [400_000..500_000, 600_000..650_000] {
        let mut into = vec![0; own.len()];
        kept.read_range(own.start as u64, &mut into).unwrap();
        assert!(into == bytes[own.clone()]);
        // It is right in each repeated reading of the whole object, whatever its count is.
        for reading in [None, None, Some(0), Some(1)] {
            into.fill(0);
            anew().read_range_past_caches(own.start as u64, &mut into, reading).unwrap();
            assert!(into == bytes[own.clone()], "{reading:?}");
        }
    }
    // A range that no server has as a whole is read in pieces. What is a hole on all servers comes as one of
    // them stores it.
    let mut into = vec![1; 300_000];
    kept.read_range(400_000, &mut into).unwrap();
    assert!(into[..150_000] == bytes[400_000..550_000] && into[200_000..] == bytes[600_000..700_000]);
    assert!(into[160_000..190_000].iter().all(|byte| *byte == 0));
}

#[test]
fn a_failed_part_is_not_replaced_by_bytes_from_holes() {
    let (dirs, bytes) = two_stores();
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let answer_with = Arc::new(AtomicU64::new(0));
    let code = Arc::clone(&answer_with);
    let answer = move |asked: &str, _: usize| {
        let code = u16::try_from(code.load(Ordering::SeqCst)).unwrap();
        status(code).filter(|_| code > 0 && asked.contains(" /objects/"))
    };
    let remote = open_urls(&[servers[0].url(), before(&servers[1], Arc::new(answer))], limits());
    all_up(&remote);
    // As in a server that serves this store.
    let fail_fast = remote.fail_fast().unwrap();
    let open = || fail_fast.open_object_of(Hash::of(&bytes), OBJECT_BYTES as u64).unwrap();
    open().holes().unwrap();
    let own = 610_000..630_000;
    let mut into = vec![0; own.len()];
    for fails in [500, 403] {
        answer_with.store(fails, Ordering::SeqCst);
        for way in 0..2 {
            let outcome = match way {
                0 => open().read_range(own.start as u64, &mut into),
                _ => open().read_range_past_caches(own.start as u64, &mut into, None),
            };
            assert!(outcome.is_err(), "{fails}: {:?}", remote.status());
        }
        answer_with.store(0, Ordering::SeqCst);
        all_up(&remote);
    }
    open().read_range(own.start as u64, &mut into).unwrap();
    assert!(into == bytes[own.clone()]);
    // When the only server with this range has lost the object, no server has the range.
    fs::remove_file(list_of(dirs[1].path(), &bytes)).unwrap();
    fs::remove_file(dirs[1].path().join("objects").join(Hash::of(&bytes).to_string())).unwrap();
    open().read_range(own.start as u64, &mut into).unwrap();
    assert!(into.iter().all(|byte| *byte == 0));
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn parts_are_found_again_after_the_complete_server_lost_the_object() {
    let ([one, other], bytes) = two_stores();
    let all = tempfile::tempdir().unwrap();
    with_versions(all.path(), OWN[0]);
    let servers = [&all, &one, &other].map(|dir| FileServer::start(dir.path(), None));
    // What a server answered is not asked again all the time.
    let soon = Limits { wait_for_better: Duration::from_millis(1), ..limits() };
    let remote = open_urls(&servers.each_ref().map(FileServer::url), soon);
    all_up(&remote);
    let fail_fast = remote.fail_fast().unwrap();
    let open = || fail_fast.open_object_of(Hash::of(&bytes), OBJECT_BYTES as u64).unwrap();
    assert!(open().holes().unwrap().is_empty());
    std::thread::sleep(Duration::from_millis(10));
    fs::remove_file(all.path().join("objects").join(Hash::of(&bytes).to_string())).unwrap();
    let mut into = vec![0; 300_000];
    open().read_range(400_000, &mut into).unwrap();
    assert!(into[..150_000] == bytes[400_000..550_000] && into[200_000..] == bytes[600_000..700_000]);
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn chunk_reads_do_not_blame_a_server_for_holes() {
    let (dirs, bytes) = two_stores();
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    // Only the server that reads prefer is asked.
    servers[1].fail_all(HttpFault::Delay(Duration::from_millis(200)));
    let late = Duration::from_secs(3600);
    let limits = Limits { hedge_after: late, hedge_after_max: late, ..limits() };
    let remote = open_urls(&servers.each_ref().map(FileServer::url), limits);
    all_up(&remote);
    let source = object(&remote, &bytes);
    read(source.as_ref(), &bytes, 610_000, 20_000).unwrap();
    assert_eq!(remote.counters().wrong_answers, 0);
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
    // The holes of this server are known now.
    let asked = servers[0].object_requests();
    read(object(&remote, &bytes).as_ref(), &bytes, 640_000, 20_000).unwrap();
    assert_eq!(servers[0].object_requests(), asked);
    // It has everything else.
    read(source.as_ref(), &bytes, 420_000, 20_000).unwrap();
    assert!(servers[0].object_requests() > asked);
}

#[test]
fn chunk_reads_wait_for_a_server_with_the_chunk() {
    let (dirs, bytes) = two_stores();
    let [one, mut other] = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let short = Limits { wait_for_better: Duration::from_millis(50), ..limits() };
    let remote = open_urls(&[one.url(), other.url()], short);
    all_up(&remote);
    other.kill();
    let source = object(&remote, &bytes);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| read(source.as_ref(), &bytes, 610_000, 20_000));
        // It is asked again, since the bytes may have been restored there.
        let asked = one.object_requests();
        until(&remote, "it is asked again and again", || one.object_requests() > asked + 8);
        assert!(!waiting.is_finished());
        other.revive();
        waiting.join().unwrap().unwrap();
    });
    let status = remote.status();
    assert_eq!(
        (remote.counters().wrong_answers, status.servers[0].state),
        (0, ServerState::Up),
        "{status:?}"
    );
}

#[test]
fn reading_a_chunk_that_all_servers_freed_fails_without_blame() {
    let (dirs, bytes) = two_stores();
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    let error = read(object(&remote, &bytes).as_ref(), &bytes, 800_000, 20_000).unwrap_err();
    let text = error.to_string();
    // The error does not say that the whole object is missing: a reader that asked for several chunks at a
    // time can get those that are there.
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{text}");
    assert_eq!(text.matches("it was deleted there, because no version").count(), 2, "{text}");
    let several = read(object(&remote, &bytes).as_ref(), &bytes, 540_000, 70_000).unwrap_err();
    assert_eq!(several.kind(), StoreErrorKind::Damaged, "{several}");
    for at in [540_000, 600_000] {
        read(object(&remote, &bytes).as_ref(), &bytes, at, 10_000).unwrap();
    }
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn a_server_with_unknown_holes_is_not_blamed() {
    let (dirs, bytes) = two_stores();
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    servers[1].fail_all(HttpFault::Delay(Duration::from_millis(200)));
    for no_list in [500, 503] {
        let answer = move |asked: &str, _: usize| status(no_list).filter(|_| asked.contains(" /holes/"));
        let late = Duration::from_secs(3600);
        let limits = Limits { hedge_after: late, hedge_after_max: late, ..limits() };
        let remote = open_urls(&[before(&servers[0], Arc::new(answer)), servers[1].url()], limits);
        all_up(&remote);
        let before = servers[0].object_requests();
        read(object(&remote, &bytes).as_ref(), &bytes, 610_000, 20_000).unwrap();
        assert!(servers[0].object_requests() > before);
        let status = remote.status();
        assert_eq!(
            (remote.counters().wrong_answers, status.servers[0].state),
            (0, ServerState::Up),
            "{status:?}"
        );
    }
}

#[test]
fn a_copy_continues_after_its_server_lost_the_object() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    let right = listed(dirs[1].path(), &bytes);
    let source = object(&remote, &bytes);
    assert!(source.holes().unwrap().bytes() < right.bytes());
    fs::remove_file(list_of(dirs[0].path(), &bytes)).unwrap();
    fs::remove_file(dirs[0].path().join("objects").join(Hash::of(&bytes).to_string())).unwrap();
    assert_eq!(holes_of_copy(source.as_ref(), &remote, to.path()), right);
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn parts_of_a_server_that_answered_late_are_copied() {
    let [holed, full, to] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (store, bytes) = with_versions(holed.path(), OWN[0]);
    free_parts(&store, &bytes);
    with_versions(full.path(), OWN[0]);
    let servers = [&holed, &full].map(|dir| FileServer::start(dir.path(), None));
    servers[0].fail_all(SLOW);
    for (way, first) in [500, 503].into_iter().enumerate() {
        let asked_before = AtomicU64::new(0);
        let answer = move |asked: &str, _: usize| {
            let is_early = asked.contains(" /holes/") && asked_before.fetch_add(1, Ordering::SeqCst) < 3;
            status(first).filter(|_| is_early)
        };
        let long = Limits { wait_for_better: Duration::from_secs(60), ..limits() };
        let remote = open_urls(&[servers[0].url(), before(&servers[1], Arc::new(answer))], long);
        all_up(&remote);
        let to = to.path().join(way.to_string());
        // The version needs the whole object, of which the first server has only a part now.
        let copied = copied_version("debian@1", &remote, &bytes, &to);
        assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{first}: {copied:?}");
        assert!(fs::read(to.join("objects").join(Hash::of(&bytes).to_string())).unwrap() == bytes);
    }
}

#[test]
fn a_copy_combines_all_parts_without_initial_lists() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let lists = dirs.each_ref().map(|dir| listed(dir.path(), &bytes));
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let urls = servers.each_ref().map(|server| {
        let asked_before = AtomicU64::new(0);
        let answer = move |asked: &str, _: usize| {
            let is_first = asked.contains(" /holes/") && asked_before.fetch_add(1, Ordering::SeqCst) == 0;
            status(500).filter(|_| is_first)
        };
        before(server, Arc::new(answer))
    });
    let remote = open_urls(&urls, limits());
    all_up(&remote);
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    check_copy(to.path(), &bytes, &common(&lists), &[KEPT, OWN[0], OWN[1]]);
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn repeated_hole_requests_bypass_stale_caches() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let lists = dirs.each_ref().map(|dir| listed(dir.path(), &bytes));
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    // The cache has answers from the time when the object was one hole.
    let (len, hits) = (bytes.len(), Arc::<AtomicU64>::default());
    let counted = Arc::clone(&hits);
    let cache = move |asked: &str, _: usize| {
        let range = asked.split("Range: bytes=").nth(1)?.split("\r\n").next()?;
        let (first, last) = range.split_once('-')?;
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first == 0 || asked.contains("no-cache") || !asked.contains(" /objects/") {
            return None;
        }
        counted.fetch_add(1, Ordering::SeqCst);
        let body = vec![0; last + 1 - first];
        let head = format!(
            "HTTP/1.1 206 x\r\nContent-Range: bytes {first}-{last}/{len}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        Some([head.as_bytes(), &body].concat())
    };
    let remote = open_urls(&[servers[0].url(), before(&servers[1], Arc::new(cache))], limits());
    all_up(&remote);
    // Wrong bytes come, so the whole object is read from one server: the one with the smaller holes.
    assert_eq!(holes_of_copy(object(&remote, &bytes).as_ref(), &remote, &to.path().join("first")), lists[0]);
    let before = hits.load(Ordering::SeqCst);
    assert!(before > 0);
    let again = object(&remote, &bytes);
    assert_eq!(*again.holes_uncached().unwrap(), common(&lists));
    assert_eq!(holes_of_copy(again.as_ref(), &remote, &to.path().join("again")), common(&lists));
    assert_eq!(hits.load(Ordering::SeqCst), before);
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn parts_of_a_missing_server_fail_after_one_wait() {
    let [holed, full, to] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (store, bytes) = with_versions(holed.path(), OWN[0]);
    free_parts(&store, &bytes);
    with_versions(full.path(), OWN[0]);
    let [one, mut other] = [&holed, &full].map(|dir| FileServer::start(dir.path(), None));
    let remote = open(&[&one, &other]);
    all_up(&remote);
    other.kill();
    let source = object(&remote, &bytes);
    let lacks = listed(holed.path(), &bytes);
    assert_eq!((source.holes().unwrap().as_ref(), remote.counters().waits), (&lacks, 0));
    assert_eq!((source.holes_uncached().unwrap().as_ref(), remote.counters().waits), (&lacks, 1));
    // The wait was in vain. No read waits again until the server is back.
    assert_eq!((source.holes_uncached().unwrap().as_ref(), remote.counters().waits), (&lacks, 1));
    other.revive();
    all_up(&remote);
    assert!(source.holes_uncached().unwrap().is_empty());
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
}

#[test]
fn a_server_without_the_object_does_not_count_as_complete() {
    let [holed, empty, to] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (store, bytes) = with_versions(holed.path(), OWN[0]);
    free_parts(&store, &bytes);
    LocalDir::open(empty.path(), Access::WRITE).unwrap();
    let servers = [&holed, &empty].map(|dir| FileServer::start(dir.path(), None));
    servers[0].fail_all(SLOW);
    let remote = open(&[&servers[0], &servers[1]]);
    all_up(&remote);
    let lacks = listed(holed.path(), &bytes);
    let source = object(&remote, &bytes);
    assert_eq!(*source.holes().unwrap(), lacks);
    assert_eq!(holes_of_copy(source.as_ref(), &remote, to.path()), lacks);
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn a_wrong_hole_list_does_not_affect_other_servers() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let right = listed(dirs[1].path(), &bytes);
    // A node over a hole is different, and the checksum is that of this list.
    let mut wrong = fs::read(list_of(dirs[0].path(), &bytes)).unwrap();
    wrong[60] ^= 1;
    let end = wrong.len() - 32;
    let sum = Hash::of(&wrong[..end]);
    wrong[end..].copy_from_slice(&sum.0);
    put_list(dirs[0].path(), &bytes, &wrong);
    let (faulty, good) = (FileServer::start(dirs[0].path(), None), FileServer::start(dirs[1].path(), None));
    good.fail_all(SLOW);
    let remote = open(&[&faulty, &good]);
    all_up(&remote);
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    check_copy(to.path(), &bytes, &right, &[KEPT, OWN[1]]);
    let status = remote.status();
    assert_eq!(remote.counters().wrong_answers, 1, "{status:?}");
    assert_eq!(status.servers[0].state, ServerState::Aside, "{status:?}");
}

#[test]
fn a_server_with_changing_lists_does_not_exclude_good_ones() {
    let (dirs, bytes) = two_stores();
    let to = tempfile::tempdir().unwrap();
    let right = listed(dirs[1].path(), &bytes);
    let lists = dirs.each_ref().map(|dir| fs::read(list_of(dir.path(), &bytes)).unwrap());
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    servers[1].fail_all(SLOW);
    let asked_before = AtomicU64::new(0);
    // The server answers with the list of the other server first: then its own ranges look like holes, and
    // what it sends of the other ranges is wrong.
    let answer = move |asked: &str, _: usize| {
        asked.contains(" /holes/").then(|| {
            let list = &lists[(asked_before.fetch_add(1, Ordering::SeqCst) as usize + 1) % 2];
            [format!("HTTP/1.1 200 x\r\nContent-Length: {}\r\n\r\n", list.len()).as_bytes(), list].concat()
        })
    };
    let wrong = Hash::of(&bytes).to_string();
    fs::write(dirs[0].path().join("objects").join(wrong), vec![7; OBJECT_BYTES]).unwrap();
    let remote = open_urls(&[before(&servers[0], Arc::new(answer)), servers[1].url()], limits());
    all_up(&remote);
    let copied = copied(&remote, &bytes, to.path());
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    check_copy(to.path(), &bytes, &right, &[KEPT, OWN[1]]);
}

#[test]
fn a_list_is_not_blamed_for_a_wrong_length() {
    let (dirs, bytes) = two_stores();
    let server = FileServer::start(dirs[0].path(), None);
    let remote = open(&[&server]);
    let longer = remote.open_object_of(Hash::of(&bytes), OBJECT_BYTES as u64 + 4096).unwrap();
    assert!(longer.holes_uncached().is_err());
    assert_eq!(remote.counters().wrong_answers, 0);
    // A damaged list counts as a wrong answer of this server.
    let mut damaged = fs::read(list_of(dirs[0].path(), &bytes)).unwrap();
    damaged[60] ^= 1;
    put_list(dirs[0].path(), &bytes, &damaged);
    assert!(longer.holes_uncached().is_err());
    assert_eq!(remote.counters().wrong_answers, 1);
}

#[test]
fn the_wait_for_a_list_of_a_busy_server_is_limited() {
    let (dirs, bytes) = two_stores();
    let server = FileServer::start(dirs[0].path(), None);
    for busy in [429, 503, 504] {
        let answer = move |asked: &str, _: usize| status(busy).filter(|_| asked.contains(" /holes/"));
        let remote = open_urls(&[before(&server, Arc::new(answer))], limits());
        let error = found_wrong(&remote, &bytes).holes().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{busy}: {error}");
        // The earlier list stays in use: the server is not asked again before each reading.
        let source = object(&remote, &bytes);
        assert!(source.holes().unwrap().is_empty());
        let waits = remote.counters().waits;
        assert!(source.was_wrong());
        source.holes().unwrap();
        assert!(remote.counters().waits <= waits + 1, "{:?}", remote.counters());
    }
}
