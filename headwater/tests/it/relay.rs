//! Servers whose store is itself on servers: what those behind cannot give now is waited for, and not taken for damage; what one of
//! them has damaged comes from another one.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headwater_remote::{Limits, Options, RemoteStore, ServerState};
use headwater_store::{Access, Hash, LocalDir, Needs, NewVersion, Object, Store, StoreError, StoreErrorKind};
use headwater_store_server::StoreServer;
use headwater_testkit::{FileServer, HttpFault, Rng, wait_until};
use tokio::sync::watch;

const OBJECT_BYTES: usize = 1 << 20;

/// A store with one image, whose one object is returned.
fn store(dir: &Path) -> Vec<u8> {
    let mut bytes = vec![0; OBJECT_BYTES];
    let mut rng = Rng::new(9);
    bytes.chunks_mut(8).for_each(|part| part.copy_from_slice(&rng.next_u64().to_le_bytes()));
    let store = LocalDir::open(dir, Access::WRITE).expect("a store");
    let mut publication = store.publish().expect("a publication");
    publication.append(&bytes).expect("room");
    let (id, _) = publication.finish_object().expect("room").expect("an object");
    let version = NewVersion {
        name: &"debian".parse().expect("a name"),
        manifest: b"a manifest",
        objects: &[id],
        size_bytes: 4096,
        created_at_s: 1,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(version).expect("a version");
    bytes
}

/// Reads from these servers, given as to `--from`, and gives up soon what cannot be had.
fn read_from(urls: &str) -> RemoteStore {
    let limits = Limits {
        probe_after: Duration::from_millis(20),
        probe_after_max: Duration::from_millis(200),
        wait_for_better: Duration::from_millis(300),
        ..Limits::default()
    };
    let servers = urls.split(',').map(|url| url.parse().expect("a URL")).collect();
    RemoteStore::open(Options { limits, ..Options::new(servers) }).expect("it is there")
}

/// A server of a store, until it is dropped.
struct Relay {
    address: SocketAddr,
    url: String,
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Relay {
    fn of(store: RemoteStore) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (tell, told) = std::sync::mpsc::channel();
        let options = headwater_store_server::Options {
            listen: "127.0.0.1:0".parse().expect("an address"),
            tls: None,
            token_file: None,
            limits: headwater_store_server::Limits::default(),
        };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(async move {
                let server = StoreServer::bind(Arc::new(store), &options).await.expect("a port");
                tell.send((server.address(), server.url())).expect("it is waited for");
                server.run(stopped).await;
            });
        });
        let (address, url) = told.recv().expect("it listens");
        Self { address, url, stop, thread: Some(thread) }
    }

    /// The head of its answer to a request for a part.
    fn head(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address).expect("it listens");
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nRange: bytes=0-999\r\n\r\n"
        )
        .expect("it reads");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("an answer");
        String::from_utf8_lossy(&bytes).split("\r\n\r\n").next().unwrap_or_default().to_lowercase()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn read(object: &dyn Object, bytes: &[u8], at: usize) -> Result<(), StoreError> {
    read_bytes(object, bytes, at, 300_000)
}

/// Less than the shortest of the parts that versions need.
fn read_part(object: &dyn Object, bytes: &[u8], at: u64) -> Result<(), StoreError> {
    read_bytes(object, bytes, at as usize, 50_000)
}

fn read_bytes(object: &dyn Object, bytes: &[u8], at: usize, len: usize) -> Result<(), StoreError> {
    let mut into = vec![0; len];
    let right = &bytes[at..at + len];
    object.read_checked(at as u64, &mut into, &mut |got| {
        if got == right {
            return Ok(());
        }
        Err(StoreError::new(StoreErrorKind::Damaged, "these are not the bytes"))
    })?;
    assert!(into == right);
    Ok(())
}

#[test]
fn what_is_damaged_on_one_of_the_servers_behind_their_server_comes_from_another_one() {
    let damages: [fn(&File) -> std::io::Result<()>; 2] =
        [|object| object.write_all_at(&[0; 16], 5000), |object| object.set_len(10_000)];
    for damage in damages {
        let (bad_dir, good_dir) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let bytes = store(bad_dir.path());
        assert!(store(good_dir.path()) == bytes);
        let id = Hash::of(&bytes);
        let object = bad_dir.path().join("objects").join(id.to_string());
        damage(&File::options().write(true).open(object).expect("an object")).expect("room");
        let (bad, good) = (FileServer::start(bad_dir.path(), None), FileServer::start(good_dir.path(), None));
        // So that the bad one is preferred, from the first probe on and on a busy host too.
        good.fail_all(HttpFault::Delay(Duration::from_millis(200)));
        let behind = read_from(&format!("{},{}", bad.url(), good.url()));
        let is_up = || behind.status().servers.iter().all(|server| server.state == ServerState::Up);
        wait_until("both are up", is_up);
        let relay = Relay::of(behind.clone());
        let remote = read_from(&relay.url);
        let object = remote.open_object_of(id, bytes.len() as u64).expect("it is there");
        for at in [4000, 0] {
            read(&*object, &bytes, at).expect("good bytes");
        }
        assert!(bad.object_requests() > 0, "the bad one was not preferred: {:?}", behind.status());
        // Nobody knows who is to blame.
        assert_eq!(remote.counters().wrong_answers, 0, "{:?}", remote.status());
        assert!(is_up(), "{:?}", behind.status());
    }
}

/// What versions need of the object: the first one all of it.
const PARTS: [(&[u8], Range<u64>); 3] =
    [(b"one", 300_000..350_000), (b"two", 400_000..550_000), (b"three", 600_000..700_000)];

struct Parts(Hash);

impl Needs for Parts {
    fn objects(&self, _: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        Ok(vec![(self.0, OBJECT_BYTES as u64)])
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        let part = PARTS.iter().find(|(version, _)| *version == manifest);
        needed(self.0, part.map_or(0..OBJECT_BYTES as u64, |(_, part)| part.clone()));
        Ok(())
    }
}

/// A store with versions that need these parts, which has given back the rest; and with damaged bytes in each of them.
fn holed(dir: &Path, parts: &[(&[u8], Range<u64>)], is_damaged: bool) -> Vec<u8> {
    let bytes = store(dir);
    let id = Hash::of(&bytes);
    let name = "debian".parse().expect("a name");
    let store = LocalDir::open(dir, Access::WRITE).expect("a store");
    for (manifest, _) in parts {
        let version = NewVersion {
            name: &name,
            manifest,
            objects: &[id],
            size_bytes: 4096,
            created_at_s: 2,
            source: "",
            note: "",
            author: "",
            unless_newest: false,
            newest_at_most: None,
            is_sealed: false,
            keeps_identity: false,
        };
        store.publish().expect("a publication").commit(version).expect("a version");
    }
    if !parts.is_empty() {
        store.remove(&name, Some(1)).expect("it is not in use");
        assert!(store.trim(&Parts(id)).expect("room") > 500_000);
    }
    let object = dir.join("objects").join(id.to_string());
    let object = File::options().write(true).open(object).expect("an object");
    for (_, part) in PARTS.iter().filter(|_| is_damaged) {
        object.write_all_at(&[0; 16], part.start + 10_000).expect("room");
    }
    bytes
}

#[test]
fn an_object_is_copied_through_a_server_one_of_whose_servers_has_it_damaged_or_gave_other_parts_back() {
    let own = |server: usize| [PARTS[0].clone(), PARTS[1 + server].clone()];
    // All of it on both; the same parts; others; others, and what only the first one has is damaged.
    for (case, is_damaged) in [(0, true), (1, true), (2, false), (3, true)] {
        let dirs = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let mut bytes = Vec::new();
        for (server, dir) in dirs.iter().enumerate() {
            let parts = match case {
                0 => Vec::new(),
                1 => PARTS.to_vec(),
                _ => own(server).to_vec(),
            };
            bytes = holed(dir.path(), &parts, is_damaged && server == 0);
        }
        let id = Hash::of(&bytes);
        for preferred in 0..2 {
            let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
            // So that the other one is preferred, also on a busy host.
            servers[1 - preferred].fail_all(HttpFault::Delay(Duration::from_millis(100)));
            let behind = read_from(&format!("{},{}", servers[0].url(), servers[1].url()));
            let is_up = || behind.status().servers.iter().all(|server| server.state == ServerState::Up);
            wait_until("both are up", is_up);
            let relay = Relay::of(behind.clone());
            let remote = read_from(&relay.url);
            let to = tempfile::tempdir().expect("a directory");
            let access = Access::Copy { new_chunk_bytes: remote.chunk_bytes() };
            let target = LocalDir::open(to.path(), access).expect("a store");
            let source = remote.open_object_of(id, bytes.len() as u64).expect("it is there");
            let mut publication = target.publish().expect("a publication");
            headwater_store::copy_object(publication.as_mut(), source.as_ref(), &mut |_| Ok(()))
                .unwrap_or_else(|e| panic!("{case}, {preferred}: {e}: {:?}", behind.status()));
            let copy = target.open_object(id).expect("it was copied");
            let parts = match case {
                0 => vec![(&b""[..], 0..OBJECT_BYTES as u64)],
                3 => own(1).to_vec(),
                _ => PARTS.to_vec(),
            };
            for (_, part) in parts {
                let mut into = vec![0; (part.end - part.start) as usize];
                copy.read_range(part.start, &mut into).expect("it is there");
                assert!(
                    into == bytes[part.start as usize..part.end as usize],
                    "{case}, {preferred}: {part:?}"
                );
            }
            assert!(is_up(), "{:?}", behind.status());
        }
    }
}

#[test]
fn what_one_of_the_servers_behind_their_server_gave_back_is_waited_for_while_the_other_one_is_away() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    holed(dirs[0].path(), &[PARTS[0].clone(), PARTS[1].clone()], false);
    let bytes = holed(dirs[1].path(), &[PARTS[0].clone(), PARTS[2].clone()], false);
    let [one, mut other] = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let behind = read_from(&format!("{},{}", one.url(), other.url()));
    let is_up = || behind.status().servers.iter().all(|server| server.state == ServerState::Up);
    wait_until("both are up", is_up);
    let relay = Relay::of(behind.clone());
    let remote = read_from(&relay.url);
    let object = remote.open_object_of(Hash::of(&bytes), bytes.len() as u64).expect("it is there");
    let part = PARTS[2].1.clone();
    // The first time nothing is known of what is gone where, and the second time it is.
    for _ in 0..2 {
        other.kill();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| read_part(&*object, &bytes, part.start));
            wait_until("it waits", || remote.status().waiting > 0);
            assert!(!reading.is_finished());
            other.revive();
            reading.join().expect("no panic").expect("it is there");
        });
        wait_until("both are up", is_up);
        assert_eq!(remote.counters().wrong_answers, 0, "{:?}", remote.status());
    }
    // One that got the bytes back since is heard again.
    other.kill();
    let full = tempfile::tempdir().expect("a directory");
    assert!(store(full.path()) == bytes);
    let id = Hash::of(&bytes).to_string();
    let place = |dir: &Path, kind: &str| dir.join(kind).join(&id);
    std::fs::copy(place(full.path(), "objects"), place(dirs[0].path(), "objects")).expect("room");
    std::fs::remove_file(place(dirs[0].path(), "holes")).expect("a list");
    read_part(&*object, &bytes, part.start).expect("it is there again");
}

#[test]
fn what_a_server_remembers_of_who_gave_what_back_is_asked_for_again_where_it_is_out_of_date() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let bytes = holed(dirs[0].path(), &[PARTS[0].clone(), PARTS[2].clone()], false);
    holed(dirs[1].path(), &[PARTS[0].clone(), PARTS[1].clone()], false);
    let servers = dirs.each_ref().map(|dir| FileServer::start(dir.path(), None));
    let behind = read_from(&format!("{},{}", servers[0].url(), servers[1].url()));
    let is_up = || behind.status().servers.iter().all(|server| server.state == ServerState::Up);
    wait_until("both are up", is_up);
    let relay = Relay::of(behind.clone());
    let (remote, id) = (read_from(&relay.url), Hash::of(&bytes));
    let open = || remote.open_object_of(id, bytes.len() as u64).expect("it is there");
    let object = open();
    object.holes().expect("a list");
    for at in [PARTS[1].1.start, PARTS[2].1.start] {
        read_part(&*object, &bytes, at).expect("each from the one that has it");
    }
    // Now each has what only the other one had.
    for kind in ["objects", "holes"] {
        let [one, other] = dirs.each_ref().map(|dir| dir.path().join(kind).join(id.to_string()));
        let kept = one.with_extension("kept");
        for (from, to) in [(&one, &kept), (&other, &one), (&kept, &other)] {
            std::fs::rename(from, to).expect("it is there");
        }
    }
    for at in [PARTS[2].1.start + 50_000, PARTS[1].1.start + 50_000] {
        read_part(&*object, &bytes, at).unwrap_or_else(|e| panic!("{e}: {:?}", behind.status()));
        read_part(&*open(), &bytes, at).expect("the same");
    }
    assert_eq!((remote.counters().wrong_answers, behind.counters().wrong_answers), (0, 0));
    assert!(is_up(), "{:?}", behind.status());
}

#[test]
fn a_server_whose_server_has_a_damaged_boot_trace_has_none_to_give() {
    let dir = tempfile::tempdir().expect("a directory");
    let bytes = store(dir.path());
    let manifest = Hash::of(b"a manifest");
    std::fs::write(dir.path().join("traces").join(manifest.to_string()), [7; 100]).expect("room");
    let behind = FileServer::start(dir.path(), None);
    let relay = Relay::of(read_from(&behind.url()));
    let error = read_from(&behind.url()).trace(manifest).expect_err("it is damaged");
    assert_eq!(error.kind(), StoreErrorKind::Damaged);
    let head = relay.head(&format!("/traces/{manifest}"));
    assert!(head.starts_with("http/1.1 404"), "{head}");
    // And is no worse a server for all else.
    let remote = read_from(&relay.url);
    assert_eq!(remote.trace(manifest).expect("it answers"), None);
    let servers = remote.status().servers;
    assert!(servers.iter().all(|server| server.state == ServerState::Up), "{servers:?}");
    let object = remote.open_object(Hash::of(&bytes)).expect("it is there");
    read(&*object, &bytes, 0).expect("it is read");
}

#[test]
fn reads_wait_while_the_server_behind_their_server_is_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let bytes = store(dir.path());
    let mut behind = FileServer::start(dir.path(), None);
    let relay = Relay::of(read_from(&behind.url()));
    let remote = read_from(&relay.url);
    let object = remote.open_object(Hash::of(&bytes)).expect("it is there");
    read(&*object, &bytes, 0).expect("good bytes");
    behind.kill();
    let head = relay.head(&format!("/objects/{}", object.id()));
    assert!(head.starts_with("http/1.1 503") && head.contains("retry-after: 1"), "{head}");
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&*object, &bytes, 5000));
        // The server answers, and the read has been refused more often than a damaged object would be asked for.
        let status = std::fmt::from_fn(|f| write!(f, "it is refused: {:?}", remote.status()));
        wait_until(status, || {
            assert!(!reading.is_finished(), "{:?}", remote.status());
            remote.status().servers[0].failures >= 4
        });
        behind.revive();
        reading.join().expect("no panic").expect("good bytes");
    });
    assert_eq!(remote.counters().wrong_answers, 0);
}

#[test]
fn what_the_server_behind_their_server_cannot_read_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let bytes = store(dir.path());
    let behind = FileServer::start(dir.path(), None);
    let relay = Relay::of(read_from(&behind.url()));
    let remote = read_from(&relay.url);
    let object = remote.open_object(Hash::of(&bytes)).expect("it is there");
    behind.fail(HttpFault::Status(500));
    // One that fails with this is there for others, so none of them is told to wait.
    std::thread::scope(|scope| {
        let readers = [0, 5000, 9000].map(|at| {
            scope.spawn({
                let (object, bytes) = (&object, &bytes);
                move || read(&**object, bytes, at)
            })
        });
        for reader in readers {
            let error = reader.join().expect("no panic").expect_err("nobody has it");
            assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
        }
    });
    behind.fail(HttpFault::None);
    read(&*object, &bytes, 0).expect("good bytes");
}
