//! The client beside a disk process that hangs.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::sync::mpsc;

use super::*;

#[test]
fn a_hung_disk_process_leaves_the_threads_of_the_daemon_free() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("disks.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let link = Arc::new(Link::new(socket));
    let disk = RemoteDisk { link, uuid: Uuid::nil(), socket: PathBuf::new(), sector_bytes: 512 };
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
