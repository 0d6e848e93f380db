//! The client beside disk processes that end, hang, or hand their disks over.

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags};
use serde_json::json;

use super::*;

/// What a disk process does with a connection.
enum Does {
    /// Ends, and has not read the call.
    ReadsNothing,
    /// Reads the call, and ends without an answer.
    Ends,
    Answers(Value),
}

/// A link to a disk process that does this with its connections, one after the other, and then ends. It returns the calls.
fn link_to(does: Vec<Does>) -> (Link, JoinHandle<Vec<Value>>) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("disks.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let process = std::thread::spawn(move || {
        let _dir = dir;
        let mut calls = Vec::new();
        for does in does {
            let (mut stream, _) = listener.accept().unwrap();
            if let Does::ReadsNothing = does {
                rustix::event::poll(&mut [PollFd::new(&stream, PollFlags::IN)], None).unwrap();
                continue;
            }
            let mut reading = BufReader::new(stream.try_clone().unwrap());
            calls.extend(receive::<Value>(&mut reading, &mut Vec::new()).unwrap());
            if let Does::Answers(answer) = does {
                writeln!(stream, "{answer}").unwrap();
            }
        }
        calls
    });
    (Link::new(socket), process)
}

fn request(uuid: Uuid) -> DiskRequest {
    let version = json!({
        "image": "i", "number": 1, "hash": "", "size_bytes": 0, "stored_bytes": 0, "created_at_ms": 0, "source": "",
    });
    let cache = json!({ "mode": "ram", "ram_bytes": 0, "disk_bytes": 0, "persistent": false, "weight": 100 });
    let request = json!({
        "machine": "lab", "uuid": uuid, "run_dir": "/", "version": version, "cache": cache, "kept": null,
        "goes_on": false, "is_recorded": false, "transport": "nbd", "firmware": "bios", "secure_boot": false,
        "scratch_bytes": 0,
    });
    serde_json::from_value(request).unwrap()
}

#[test]
fn a_call_that_was_not_begun_is_made_again() {
    let done = Does::Answers(json!({ "done": null }));
    let (link, process) =
        link_to(vec![Does::ReadsNothing, Does::Answers("not_begun".into()), Does::ReadsNothing, done]);
    let discard = Call::Discard { id: Uuid::nil() };
    assert!(!discard.may_be_repeated());
    link.call::<()>(&discard).unwrap();
    assert_eq!(process.join().unwrap().len(), 2);
    // A call that may have been carried out is not.
    let (link, process) = link_to(vec![Does::Ends]);
    assert_eq!(link.call::<()>(&discard).unwrap_err().kind(), ProblemKind::Unavailable);
    assert_eq!(process.join().unwrap().len(), 1);
}

#[test]
fn a_call_that_is_never_begun_fails_in_the_end() {
    let (link, process) = link_to(vec![Does::Answers("not_begun".into())]);
    let link = Link { not_begun_within: Duration::ZERO, ..link };
    let error = link.call::<()>(&Call::Discard { id: Uuid::nil() }).unwrap_err();
    assert_eq!(error.kind(), ProblemKind::Unavailable);
    let text = format!("{:#}", anyhow::Error::new(error));
    assert!(text.contains("it hands its disks over"), "{text}");
    assert_eq!(process.join().unwrap().len(), 1);
}

#[test]
fn a_disk_whose_opening_has_no_answer_is_closed() {
    let uuid = Uuid::from_u128(7);
    let (link, process) = link_to(vec![Does::Ends, Does::Answers(json!({ "done": false }))]);
    assert_eq!(link.open_disk(request(uuid)).unwrap_err().kind(), ProblemKind::Unavailable);
    let calls = process.join().unwrap();
    assert!(calls[0].get("open").is_some() && calls[1] == json!({ "close": { "uuid": uuid } }), "{calls:?}");
    assert!(link.open.lock().disks.is_empty());
}

#[test]
fn a_disk_that_an_ended_process_opened_is_looked_for_in_the_next() {
    let uuid = Uuid::from_u128(7);
    let has =
        json!({ "done": { "uuid": uuid, "socket": "/s", "sector_bytes": 512, "is_persistent": false } });
    for (answer, is_there) in [(has, true), (json!({ "done": null }), false)] {
        let (link, process) = link_to(vec![Does::Answers(answer)]);
        let before = link.open.lock().process;
        link.open.lock().process += 1;
        assert_eq!(link.note_open(uuid, before).is_ok(), is_there);
        assert_eq!(link.open.lock().disks.contains_key(&uuid), is_there);
        assert!(process.join().unwrap()[0].get("adopt").is_some());
    }
}

#[test]
fn a_hung_disk_process_leaves_the_threads_of_the_daemon_free() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("disks.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let link = Arc::new(Link::new(socket));
    let (uuid, socket, is_persistent) = (Uuid::nil(), PathBuf::new(), false);
    let disk = RemoteDisk { link, uuid, socket, sector_bytes: 512, is_persistent };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let asked = runtime.spawn(async move { disk.can_freeze() });
    let (mut call, _) = listener.accept().unwrap();
    call.read_exact(&mut [0]).unwrap();
    let (done, is_done) = mpsc::channel();
    runtime.spawn(async move { done.send(()).unwrap() });
    let other = is_done.recv_timeout(Duration::from_secs(60));
    // No other disk process follows, to which the call would be made again.
    drop((listener, call));
    assert_eq!(other, Ok(()), "another task waits for the disk process too");
    assert_eq!(runtime.block_on(asked).unwrap().unwrap_err().kind(), ProblemKind::Unavailable);
}

#[test]
fn a_persistent_disk_whose_closing_was_cut_off_is_said_to_miss_writes() {
    let uuid = Uuid::from_u128(7);
    for (is_persistent, was_open) in [(true, true), (false, false), (true, false)] {
        let answer = || Does::Answers(json!({ "done": was_open }));
        let (link, process) = link_to(vec![Does::Ends, answer(), answer()]);
        link.open.lock().disks.insert(uuid, 0);
        let closed = link.close_disk(uuid, is_persistent);
        assert_eq!(closed.is_err(), is_persistent && !was_open, "{closed:?}");
        // It is said once.
        link.close_disk(uuid, is_persistent).unwrap();
        process.join().unwrap();
    }
}
