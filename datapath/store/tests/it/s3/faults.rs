//! Listings, removals and writes that fail, for a while or for good: what versions need stays, and what no
//! version needs is removed once the server works again.

use headwater_store::{Image, Removed};
use headwater_testkit::Rng;

use super::*;

/// Answers with status 200 in place of a listing: an error, the page of a proxy, a page of a listing that
/// does not say where the next one is, and one that leads back to itself.
const ERROR: Fault = Fault::Instead(
    "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>by the relay</Message></Error>",
);
const SIGN_IN: Fault = Fault::Instead("<html><head><title>Sign in</title></head><body>Sign in</body></html>");
const NO_NEXT: Fault = Fault::Instead("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>");
const IN_CIRCLES: Fault = Fault::Instead(
    "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>\
     </ListBucketResult>",
);

/// An image, a folder of its name, a folder of another name, and the folder of all images, as some programs
/// create them.
const AS_FOLDERS: Fault = Fault::Instead(
    "<ListBucketResult><IsTruncated>false</IsTruncated>\
     <Contents><Key>some/prefix/images/</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>0</Size></Contents>\
     <Contents><Key>some/prefix/images/a</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>99</Size></Contents>\
     <Contents><Key>some/prefix/images/a/</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>0</Size></Contents>\
     <Contents><Key>some/prefix/images/c/</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>0</Size></Contents>\
     </ListBucketResult>",
);

/// Passes the request on.
const NONE: Fault = Fault::Delay(Duration::ZERO);

/// The object that only the removed version of these tests has, and how much space it takes.
const OBJECT: &[u8] = b"the object that goes";
const MANIFEST: &[u8] = b"the manifest that goes";
const TRACE: &[u8] = b"its trace";
const GOING_BYTES: u64 = (OBJECT.len() + MANIFEST.len() + TRACE.len()) as u64;

/// The target of requests for a listing of a folder, including its pages after the first.
fn listing(folder: &str) -> String {
    format!("prefix=some%2Fprefix%2F{folder}%2F")
}

fn later_page(folder: &str) -> String {
    format!("continuation-token=some%2Fprefix%2F{folder}%2F")
}

/// A store with two images that share an object, opened by two clients.
struct Shelf {
    place: InBucket,
    relay: HttpRelay,
    /// The requests of this client go through the relay, which lets them fail.
    store: S3Store,
    /// The requests of this client do not go through the relay.
    other: Arc<dyn Store>,
}

impl Shelf {
    /// A client that sends each request this often, and waits this long for an answer.
    fn new(attempts: u32, timeout: Duration) -> Self {
        let relay = HttpRelay::start(server().address());
        let place = InBucket::new(relay.address());
        let other = suite::writable(&place.direct());
        publish(other.as_ref(), "a", b"shared", &[], b"a1").unwrap();
        publish(other.as_ref(), "b", b"own", &[Hash::of(b"shared")], b"b1").unwrap();
        let mut options = place.options();
        (options.attempts, options.timeout) = (attempts, Some(timeout));
        options.pause = Duration::from_millis(1);
        let store = S3Store::open(&place.url, Access::WRITE, &options).unwrap();
        Self { place, relay, store, other }
    }

    /// Checks that everything that the listed versions need is there.
    fn all_is_there(&self, when: &str) {
        let must_be = |folder: &str, id: Hash| {
            let path = self.place.dir().join(folder).join(id.to_string());
            let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e} {when}", path.display()));
            assert_eq!(Hash::of(&bytes), id, "{when}");
        };
        let images = self.other.images().unwrap();
        assert!(images.len() >= 2, "{when}");
        for version in images.iter().flat_map(|image| &image.versions) {
            must_be("manifests", version.manifest);
            version.objects.iter().for_each(|id| must_be("objects", *id));
        }
    }

    /// Makes marks that could not be removed as old as expired ones.
    fn let_marks_lapse(&self) {
        for mark in self.place.keys("locks") {
            make_older(&self.place.dir().join("locks").join(mark), Duration::from_secs(700));
        }
    }

    /// Removes a version while requests fail as `faults` says. Then removes it, or what was left of it,
    /// without faults. What other versions need is there all the time, and everything else is removed in the
    /// end.
    fn remove(&self, when: &str, faults: impl FnOnce(&HttpRelay)) -> Result<Removed, StoreError> {
        let before = files(self.place.dir());
        let version = publish(self.other.as_ref(), "a", OBJECT, &[Hash::of(b"shared")], MANIFEST).unwrap();
        let traces = self.place.dir().join("traces");
        fs::create_dir_all(&traces).unwrap();
        fs::write(traces.join(version.manifest.to_string()), TRACE).unwrap();
        faults(&self.relay);
        let removed = self.store.remove(&name("a"), Some(version.number));
        self.all_is_there(when);
        self.relay.heal();
        self.let_marks_lapse();
        let listed = self.other.image(&name("a")).unwrap().unwrap().versions;
        if listed.iter().any(|there| there.number == version.number) {
            assert!(removed.is_err(), "{when}");
            self.store.remove(&name("a"), Some(version.number)).unwrap_or_else(|e| panic!("{e} {when}"));
        } else {
            assert!(removed.is_ok(), "{when}");
            self.store.reclaim_left().unwrap_or_else(|e| panic!("{e} {when}"));
        }
        self.all_is_there(when);
        assert_eq!(files(self.place.dir()), before, "{when}");
        for folder in ["traces", "locks"] {
            assert_eq!(self.place.keys(folder), [] as [&str; 0], "{folder} {when}");
        }
        removed
    }
}

#[test]
fn a_listing_that_fails_for_a_while_is_repeated() {
    const FOLDERS: [&str; 9] =
        ["holds", "images", "pins", "locks", "manifests", "objects", "holed", "traces", "tmp"];
    let shelf = Shelf::new(5, Duration::from_secs(20));
    for fault in [Fault::Status(500), Fault::Cut, Fault::CutUnnoticed, ERROR] {
        let removed = shelf.remove(&format!("{fault:?}"), |relay| {
            for folder in FOLDERS.map(listing) {
                relay.fail("GET", &folder, fault, 2);
                // If a folder is listed twice, the second listing fails, too.
                relay.fail("GET", &folder, NONE, 1);
                relay.fail("GET", &folder, fault, 2);
            }
        });
        assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES, "{fault:?}");
    }
}

#[test]
fn nothing_counts_as_missing_if_a_listing_fails_for_good() {
    let shelf = Shelf::new(2, Duration::from_secs(20));
    let (refused, away) = (StoreErrorKind::Io, StoreErrorKind::Unreachable);
    // The first `passing` listings of the folder do not fail.
    let remove = |folder: &str, passing: u32, fault: Fault| {
        shelf.remove(&format!("{folder} {passing} {fault:?}"), |relay| {
            relay.fail("GET", &listing(folder), NONE, passing);
            relay.fail("GET", &listing(folder), fault, u32::MAX);
        })
    };
    // Before anything is changed.
    for (folder, fault, wanted, says) in [
        ("images", Fault::Status(500), away, "The server has a problem"),
        ("images", Fault::Status(403), refused, "s3:ListBucket"),
        ("images", SIGN_IN, away, "not a listing, but 'html'. Check that http://127.0.0.1"),
        ("images", NO_NEXT, away, "has no continuation token"),
        ("images", IN_CIRCLES, refused, "has no end"),
        ("holds", ERROR, away, "not a listing, but 'Error'"),
        ("pins", Fault::CutUnnoticed, away, "Check that http://127.0.0.1"),
    ] {
        let error = remove(folder, 0, fault).unwrap_err();
        let message = error.to_string();
        assert_eq!(error.kind(), wanted, "{message}");
        assert!(message.contains("cannot list s3://") && message.contains(says), "no '{says}' in: {message}");
    }
    // When the version is off the list, and the store looks for what can be removed.
    let for_space = [
        ("locks", 0),
        ("images", 1),
        ("pins", 1),
        ("holds", 1),
        ("manifests", 0),
        ("objects", 0),
        ("holed", 0),
        ("traces", 0),
        ("tmp", 0),
    ];
    let in_images = [
        Fault::Status(500),
        Fault::Status(403),
        Fault::Status(404),
        Fault::Refuse,
        Fault::Cut,
        Fault::CutUnnoticed,
        SIGN_IN,
        NO_NEXT,
        IN_CIRCLES,
    ];
    let in_images = in_images.map(|fault| (("images", 1), fault));
    let cut = ["pins", "holds"].map(|folder| ((folder, 1), Fault::CutUnnoticed));
    let cases = for_space.into_iter().map(|place| (place, ERROR)).chain(in_images).chain(cut);
    for ((folder, passing), fault) in cases {
        let removed = remove(folder, passing, fault).unwrap();
        assert_eq!(removed.freed_bytes, 0, "{folder} {fault:?}");
    }
}

#[test]
fn nothing_counts_as_missing_if_a_later_page_fails() {
    let shelf = Shelf::new(2, Duration::from_secs(20));
    let in_pages = |relay: &HttpRelay| relay.fail("GET", "list-type=2", Fault::Pages(1), u32::MAX);
    let removed = shelf.remove("in pages", in_pages);
    assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES);
    // Image `b` is on the second page, which is asked for twice.
    for fault in [Fault::Refuse, Fault::CutUnnoticed, ERROR] {
        let removed = shelf.remove(&format!("{fault:?} for a while"), |relay| {
            for fault in [fault, NONE, fault] {
                relay.fail("GET", &later_page("images"), fault, 1);
            }
            relay.fail("GET", &later_page("objects"), fault, 1);
            in_pages(relay);
        });
        assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES, "{fault:?}");
    }
    for fault in [Fault::Status(500), Fault::Refuse, Fault::Cut, Fault::CutUnnoticed, ERROR, NO_NEXT] {
        let removed = shelf.remove(&format!("{fault:?} for good"), |relay| {
            relay.fail("GET", &later_page("images"), NONE, 1);
            relay.fail("GET", &later_page("images"), fault, u32::MAX);
            in_pages(relay);
        });
        assert_eq!(removed.unwrap().freed_bytes, 0, "{fault:?}");
    }
    // A page that fails is asked for again, and the pages before it are not.
    shelf.relay.take_seen();
    shelf.relay.fail("GET", &later_page("images"), Fault::Refuse, 1);
    in_pages(&shelf.relay);
    assert_eq!(shelf.store.images().unwrap().len(), 2);
    shelf.relay.heal();
    let seen = shelf.relay.take_seen();
    let asked: Vec<bool> =
        seen.iter().filter(|it| it.contains("list-type=2")).map(|it| it.contains("token")).collect();
    assert_eq!(asked, [false, true, true], "{seen:?}");
}

#[test]
fn a_listed_but_missing_image_keeps_its_objects() {
    let shelf = Shelf::new(2, Duration::from_secs(20));
    let removed = shelf.remove("404", |relay| relay.fail("GET", "/images/b", Fault::Status(404), u32::MAX));
    assert_eq!(removed.unwrap().freed_bytes, 0);
}

#[test]
fn an_empty_list_counts_as_damaged_and_keeps_objects() {
    let shelf = Shelf::new(2, Duration::from_secs(20));
    let list = shelf.place.dir().join("images/b");
    let whole = fs::read(&list).unwrap();
    fs::write(&list, b"").unwrap();
    let listed = shelf.store.listed().unwrap();
    assert_eq!(listed.images.len(), 1);
    let [(unreadable, why)] = listed.unreadable.as_slice() else { panic!("{listed:?}") };
    assert_eq!((unreadable, why.kind()), (&name("b"), StoreErrorKind::Damaged), "{why}");
    assert_eq!(kind(shelf.store.remove(&name("a"), Some(1))), StoreErrorKind::Damaged);
    fs::create_dir_all(shelf.place.dir().join("locks")).unwrap();
    fs::write(shelf.place.dir().join("locks/sweep"), b"sweep\n").unwrap();
    assert_eq!(kind(shelf.store.reclaim_left()), StoreErrorKind::Damaged);
    // Nor if the store is cleaned up when it is opened.
    suite::writable(&shelf.place);
    fs::write(&list, whole).unwrap();
    shelf.all_is_there("after an empty list");
    assert_eq!(shelf.store.reclaim_left().unwrap(), 0);
    assert_eq!(shelf.place.keys("locks"), [] as [&str; 0]);
}

#[test]
fn a_folder_is_no_image() {
    let shelf = Shelf::new(2, Duration::from_secs(20));
    shelf.relay.fail("GET", &listing("images"), AS_FOLDERS, 1);
    let images = shelf.store.images().unwrap();
    assert_eq!(images.iter().map(|image| image.name.clone()).collect::<Vec<_>>(), [name("a")]);
}

#[test]
fn a_claimed_length_allocates_no_memory() {
    const CLAIM: Fault = Fault::Claim(1 << 62);
    let shelf = Shelf::new(5, Duration::from_secs(20));
    // In more than one piece.
    let manifest = vec![7u8; 300_000];
    let version = publish(&shelf.store, "c", OBJECT, &[], &manifest).unwrap();
    // The server claims another length for the manifest that is there: the manifest is sent again.
    shelf.relay.take_seen();
    shelf.relay.fail("GET", "/manifests/", CLAIM, 1);
    publish(&shelf.store, "c", OBJECT, &[], &manifest).unwrap();
    let sent = |request: &String| request.starts_with("PUT") && request.contains("/manifests/");
    assert!(shelf.relay.take_seen().iter().any(sent));
    shelf.relay.fail("GET", "/manifests/", CLAIM, 1);
    assert_eq!(kind(shelf.store.manifest(version.manifest)), StoreErrorKind::Damaged);
    // So many images that their listing comes in more than one piece.
    for number in 0..500 {
        let image = Image::empty(name(&format!("d{number}")));
        let list = shelf.place.dir().join("images").join(image.name.to_string());
        fs::write(list, image.encode().unwrap()).unwrap();
    }
    shelf.relay.fail("GET", &listing("images"), CLAIM, 2);
    assert_eq!(shelf.store.images().unwrap().len(), 503);
    shelf.all_is_there("in the end");
}

#[test]
fn removals_end_before_their_mark_is_stale() {
    let (mut place, relay, object) = behind_a_relay();
    place.timeout = NEVER;
    place.stale_after = Duration::from_secs(10);
    let store = suite::writable(&place);
    // The mark that was written to learn the server's time is removed. The object and the manifest are not.
    relay.fail("POST", "delete", NONE, 1);
    relay.fail("POST", "delete", Fault::Silence, 2);
    let removed = store.remove(&name("a"), Some(1)).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[1][..], 0));
    relay.heal();
    assert!(store.reclaim_left().unwrap() > object.len() as u64);
    for folder in ["objects", "manifests", "locks"] {
        assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
    }
}

#[test]
fn keys_that_cannot_be_deleted_are_deleted_later() {
    let faults =
        [Fault::Status(500), Fault::Refuse, Fault::LoseAnswer, Fault::Cut, Fault::CutUnnoticed, ERROR];
    let shelf = Shelf::new(5, Duration::from_secs(20));
    for fault in faults {
        let removed = shelf.remove(&format!("{fault:?} for a while"), |relay| {
            // First the removal of the mark that was written to learn the server's time, and then that of
            // what is freed.
            for (fault, times) in [(fault, 1), (NONE, 1), (fault, 4)] {
                relay.fail("POST", "delete", fault, times);
            }
        });
        assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES, "{fault:?}");
    }
    let shelf = Shelf::new(2, Duration::from_secs(20));
    // From the first request on, or when the time is known.
    let for_good = faults.into_iter().chain([Fault::Status(403)]).map(|fault| (1, fault));
    for (passing, fault) in for_good.chain([(0, Fault::Status(500)), (0, Fault::LoseAnswer)]) {
        let removed = shelf.remove(&format!("{fault:?} after {passing}"), |relay| {
            relay.fail("POST", "delete", NONE, passing);
            relay.fail("POST", "delete", fault, u32::MAX);
        });
        assert_eq!(removed.unwrap().freed_bytes, 0, "{fault:?} after {passing}");
    }
}

#[test]
fn an_image_whose_list_cannot_be_deleted_frees_its_space() {
    let shelf = Shelf::new(2, Duration::from_secs(20));
    let before = files(shelf.place.dir());
    publish(shelf.other.as_ref(), "c", OBJECT, &[Hash::of(b"shared")], MANIFEST).unwrap();
    shelf.relay.fail("POST", "delete", Fault::Status(500), u32::MAX);
    let error = shelf.store.remove(&name("c"), None).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("cannot remove s3://"), "{error}");
    shelf.relay.heal();
    shelf.let_marks_lapse();
    assert_eq!(shelf.store.reclaim_left().unwrap(), GOING_BYTES - TRACE.len() as u64);
    shelf.all_is_there("after the removal");
    shelf.store.remove(&name("c"), None).unwrap();
    assert_eq!(files(shelf.place.dir()), before);
    assert_eq!(shelf.place.keys("locks"), [] as [&str; 0]);
}

/// An answer that comes too late for a client that waits a second.
const LATE: Fault = Fault::Delay(Duration::from_millis(1500));

/// Publishes a version while answers to writes are missing, this often each.
fn publish_while(fault: Fault, times: u32) {
    let shelf = Shelf::new(5, Duration::from_secs(1));
    for target in ["/locks/writer", "/objects/", "/manifests/", "/images/"] {
        shelf.relay.fail("PUT", target, fault, times);
    }
    let version = publish(&shelf.store, "a", b"written", &[], b"written once").unwrap();
    shelf.relay.heal();
    shelf.all_is_there(&format!("{fault:?}"));
    let listed = shelf.other.image(&name("a")).unwrap().unwrap().versions;
    let manifests: Vec<Hash> = listed.iter().map(|version| version.manifest).collect();
    assert_eq!(manifests, [Hash::of(b"a1"), version.manifest], "{fault:?}");
}

/// Removes a version while answers to writes are missing, this often each.
fn remove_while(fault: Fault, times: u32) {
    let shelf = Shelf::new(5, Duration::from_secs(1));
    let removed = shelf.remove(&format!("{fault:?}"), |relay| {
        for target in ["/locks/exclusive", "/images/"] {
            relay.fail("PUT", target, fault, times);
        }
    });
    assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES, "{fault:?}");
}

#[test]
fn a_write_whose_answer_is_lost_is_made_once() {
    publish_while(Fault::LoseAnswer, 2);
    remove_while(Fault::LoseAnswer, 2);
}

/// Publishes a version whose object is never answered in time.
fn publish_in_vain(fault: Fault) {
    let shelf = Shelf::new(3, Duration::from_secs(1));
    let before = files(shelf.place.dir());
    shelf.relay.fail("PUT", "/objects/", fault, u32::MAX);
    let error = publish(&shelf.store, "a", OBJECT, &[], MANIFEST).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("did not answer in full within 1.0 s"), "{error}");
    shelf.relay.heal();
    shelf.all_is_there(&format!("{fault:?}"));
    assert_eq!(files(shelf.place.dir()), before, "{fault:?}");
}

/// The parts run at the same time, because each waits most of the time.
#[test]
fn late_or_missing_answers_lose_nothing() {
    let slow_listings = || {
        let removed = Shelf::new(5, Duration::from_secs(1)).remove("listings", |relay| {
            relay.fail("GET", &listing("images"), NONE, 1);
            relay.fail("GET", &listing("images"), Fault::Silence, 1);
            relay.fail("GET", &listing("objects"), Fault::Trickle, 1);
            relay.fail("GET", &listing("manifests"), LATE, 1);
        });
        assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES);
    };
    let slow_removals = || {
        let removed = Shelf::new(3, Duration::from_secs(1)).remove("removals", |relay| {
            relay.fail("POST", "delete", NONE, 1);
            // The answers for the three keys that are deleted are missing. The lock is removed after that.
            relay.fail("POST", "delete", Fault::Silence, 9);
        });
        assert_eq!(removed.unwrap().freed_bytes, 0);
    };
    let unknown = || {
        let removed = Shelf::new(3, Duration::from_secs(1)).remove("the list", |relay| {
            relay.fail("PUT", "/images/", Fault::Silence, u32::MAX);
        });
        let message = removed.unwrap_err().to_string();
        assert!(message.contains("it is unknown whether image 'a'"), "{message}");
    };
    let made = || {
        let removed = Shelf::new(3, Duration::from_secs(1))
            .remove("the list", |relay| relay.fail("PUT", "/images/", LATE, u32::MAX));
        assert_eq!(removed.unwrap().freed_bytes, GOING_BYTES);
    };
    std::thread::scope(|scope| {
        scope.spawn(slow_listings);
        scope.spawn(slow_removals);
        scope.spawn(unknown);
        scope.spawn(made);
        scope.spawn(|| publish_while(LATE, 1));
        scope.spawn(|| remove_while(LATE, 1));
        scope.spawn(|| publish_in_vain(Fault::Silence));
        scope.spawn(|| publish_in_vain(LATE));
    });
}

#[test]
fn parts_whose_answers_are_lost_cut_or_late_make_one_object() {
    let shelf = Shelf::new(5, Duration::from_secs(3));
    let before = files(shelf.place.dir());
    let bytes = Rng::new(5).bytes((16 << 20) + 1000);
    for (method, target, fault, times) in [
        ("POST", "uploads", Fault::Cut, 1),
        ("POST", "uploads", Fault::LoseAnswer, 1),
        ("PUT", "partNumber=1", Fault::LoseAnswer, 1),
        ("PUT", "partNumber=1", Fault::Status(503), 1),
        ("PUT", "partNumber=2", Fault::Delay(Duration::from_secs(4)), 1),
        ("POST", "uploadId=", Fault::Cut, 1),
        // For a completed upload the server of these tests answers 403, and others answer that there is none.
        ("POST", "uploadId=", Fault::Status(404), u32::MAX),
    ] {
        shelf.relay.fail(method, target, fault, times);
    }
    publish_whole(&shelf.store, &bytes);
    shelf.relay.heal();
    shelf.all_is_there("in parts");
    shelf.store.remove(&name("large"), None).unwrap();
    assert_eq!(files(shelf.place.dir()), before);

    // A server that becomes full in the middle of the upload.
    shelf.relay.take_seen();
    shelf.relay.fail("PUT", "partNumber=2", Fault::Refusal(403, "QuotaExceeded"), u32::MAX);
    let mut publication = shelf.store.publish().unwrap();
    publication.append(&bytes).unwrap();
    let full = publication.finish_object().unwrap_err();
    assert_eq!(full.kind(), StoreErrorKind::NoSpace, "{full}");
    drop(publication);
    shelf.relay.heal();
    let seen = shelf.relay.take_seen();
    let count = |method: &str, target: &str| {
        seen.iter().filter(|it| it.starts_with(method) && it.contains(target)).count()
    };
    assert_eq!((count("PUT", "partNumber=2"), count("DELETE", "uploadId=")), (1, 1), "{seen:?}");
    assert_eq!(files(shelf.place.dir()), before);
}

#[test]
fn keys_after_the_first_page_count() {
    const MANY: u32 = 1100;
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    let needed = publish(store.as_ref(), "a", b"needed", &[], b"m1").unwrap();
    let going = publish(store.as_ref(), "a", b"going", &[], b"m2").unwrap();
    // Keys of a manifest that comes before all others in a listing.
    let first = format!("{:064x}", 1);
    let fill = |folder: String| {
        let folder = place.dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        (0..MANY).for_each(|number| fs::write(folder.join(format!("x.d.{number}")), b"x\n").unwrap());
    };
    // A hold.
    fill(format!("holds/{first}/b"));
    let held = root(going.manifest, "d1", RetentionPurpose::Pin);
    store.retain(&held).unwrap();
    assert_eq!(kind(store.remove(&name("a"), Some(2))), StoreErrorKind::InUse);
    assert_eq!(
        store.roots_of("d1").unwrap(),
        [held.clone()].map(|held| RetentionRoot { holder: String::new(), ..held })
    );
    store.release(&held).unwrap();
    // A pin that came after the removal.
    fill(format!("pins/{first}"));
    let publication = store.publish().unwrap();
    assert_eq!(store.remove(&name("a"), Some(2)).unwrap().freed_bytes, 0);
    let reader = place.open(Access::Read).unwrap();
    let pin = reader.pin(going.manifest).unwrap();
    drop(publication);
    assert_eq!(reader.manifest(going.manifest).unwrap(), b"m2");
    reader.open_object(going.objects[0]).unwrap();
    drop(pin);
    // Images whose names come before that of the image with versions, and objects that no version needs.
    for number in 0..MANY {
        let image = Image::empty(name(&format!("0-{number}")));
        let list = place.dir().join("images").join(image.name.to_string());
        fs::write(list, image.encode().unwrap()).unwrap();
        let orphan = Hash::of(&number.to_le_bytes()).to_string();
        fs::write(place.dir().join("objects").join(orphan), b"orphan").unwrap();
    }
    assert_eq!(store.reclaim_left().unwrap(), u64::from(MANY) * 6 + 5 + 2);
    assert_eq!(place.keys("objects"), [needed.objects[0].to_string()]);
    assert_eq!(place.keys("manifests"), [needed.manifest.to_string()]);
    assert_eq!(place.keys("locks"), [] as [&str; 0]);
}
