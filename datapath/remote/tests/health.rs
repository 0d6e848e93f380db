//! How the state of servers changes, and whom that concerns.

use headwater_remote::{Options, RemoteStore, ServerState};
use headwater_testkit::FileServer;
use support::{limits, object, options, read, store};

mod support;

#[test]
fn a_token_that_was_replaced_is_shown_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let token = dir.path().join("token");
    std::fs::write(&token, "old").unwrap();
    server.ask_for_token("old");
    let remote =
        RemoteStore::open(Options { token_file: Some(token.clone()), ..options(&[&server]) }).unwrap();
    let object = object(&remote, &bytes);
    read(&*object, &bytes, 0, 1000).unwrap();
    std::fs::write(&token, "new").unwrap();
    server.ask_for_token("new");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (object, bytes) = (&object, &bytes);
            scope.spawn(move || read(&**object, bytes, n * 1000, 1000).unwrap());
        }
    });
    let status = remote.status();
    assert_eq!((status.servers[0].state, status.servers[0].failures), (ServerState::Up, 0), "{status:?}");
    assert_eq!(remote.counters().waits, 0);
}
