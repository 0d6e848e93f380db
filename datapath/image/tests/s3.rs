//! Verification and repair of a store in S3, against a real server on loopback.

mod fixture;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fixture::{disk_of, noise, store};
use headwater_image::{Cancel, ImageErrorKind, ImportOptions, import, repair, verify};
use headwater_store::{Access, Keys, S3Options, S3Store, Store, Version};
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};

/// The server is this program once more, in this test.
const SERVED_BY: &str = "a_server_that_is_gone_is_no_damage";

struct Served {
    server: S3Server,
    store: S3Store,
    /// Where the keys are.
    keys: PathBuf,
    _dir: tempfile::TempDir,
}

fn served() -> Served {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(dir.path(), SERVED_BY);
    let keys = server.bucket("images").join("store");
    let url = format!("s3://images/store?endpoint=http://{}", server.address()).parse().unwrap();
    let mut options = S3Options::new("tester");
    options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
    options.timeout = Some(Duration::from_secs(20));
    options.pause = Duration::from_millis(5);
    let store = S3Store::open(&url, Access::WRITE, &options).unwrap();
    Served { server, store, keys, _dir: dir }
}

fn import_to(store: &dyn Store, disk: &[u8]) -> Version {
    let options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    let source = disk_of(disk.to_vec());
    import(source, store, &options, &mut |_| {}).unwrap().version
}

#[test]
fn a_server_that_is_gone_is_no_damage() {
    serve_if_asked();
    let mut served = served();
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let version = import_to(&served.store, &disk);
    let (store, mut began) = (served.store.clone(), false);
    // When the objects are open, and before a chunk is read.
    let error = verify(&store, version.manifest, &Cancel::new(), &mut |_| {
        if !std::mem::replace(&mut began, true) {
            served.server.kill();
        }
    });
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Io, "{error}");
    assert!(error.to_string().contains("can be reached"), "{error}");
    served.server.revive();
    assert!(verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound());
    // What is gone while the server is there is damage.
    fs::remove_file(served.keys.join("objects").join(version.objects[0].to_string())).unwrap();
    let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, 64));
}

#[test]
fn an_object_that_is_damaged_in_other_places_too_is_copied_as_a_whole() {
    let served = served();
    let (_dir, other) = store();
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let mut half = disk.clone();
    half[..2 << 20].fill(0);
    let versions = [&disk, &half].map(|disk| {
        import_to(&other, disk);
        import_to(&served.store, disk)
    });
    assert_eq!(versions[0].objects, versions[1].objects);
    // Only the second version is left, and it needs the second half of the object.
    served.store.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    let object = versions[1].objects[0];
    let path = served.keys.join("objects").join(object.to_string());
    let good = fs::read(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    for at in [1 << 20, 3 << 20] {
        file.write_all_at(b"rotten", at).unwrap();
    }
    let manifest = versions[1].manifest;
    let found = verify(&served.store, manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.objects.len(), found.damaged_chunks), (0, 1));
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let done =
        repair(&served.store, manifest, &found, &sources, &headwater_image::Round::new(None), &Cancel::new())
            .unwrap();
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}
