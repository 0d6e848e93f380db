//! Changes whose answers are lost, or that fail.

use headwater_store::{Channel, Pointer};

use super::*;

#[test]
fn a_lost_answer_is_not_mistaken_for_another_writer() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    for (target, round) in [("/images/", 1u8), ("/manifests/", 2), ("/objects/", 3), ("/locks/", 4)] {
        relay.fail("PUT", target, Fault::LoseAnswer, 1);
        publish(store.as_ref(), "a", &[round; 50], &[], &[round; 7]).unwrap();
    }
    let image = store.image(&name("a")).unwrap().unwrap();
    let numbers: Vec<u32> = image.versions.iter().map(|version| version.number).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5]);
}

#[test]
fn a_change_whose_answer_is_lost_is_not_made_twice() {
    let (mut place, relay, _) = behind_a_relay();
    place.timeout = NEVER;
    let (store, other) = (suite::writable(&place), suite::writable(&place.direct()));
    relay.take_seen();
    // The change is written, and another writer comes before the next attempt.
    relay.fail("PUT", "/images/", Fault::LoseAnswer, 1);
    relay.fail("PUT", "/images/", Fault::Silence, u32::MAX);
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| publish(store.as_ref(), "a", b"ours", &[], b"ours"));
        let mut tries = 0;
        wait_until("the change is attempted again", || {
            tries += relay
                .take_seen()
                .iter()
                .filter(|it| it.starts_with("PUT") && it.contains("/images/"))
                .count();
            tries == 2
        });
        publish(other.as_ref(), "a", b"theirs", &[], b"theirs").unwrap();
        relay.heal();
        let error = publishing.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unknown, "{error}");
        assert!(error.to_string().contains("it is unknown whether"), "{error}");
    });
    let versions = store.image(&name("a")).unwrap().unwrap().versions;
    let made: Vec<Hash> = versions.iter().map(|version| version.manifest).collect();
    assert_eq!(made, [b"manifest".as_slice(), b"ours", b"theirs"].map(Hash::of));
    for version in versions {
        store.manifest(version.manifest).unwrap();
        store.open_object(version.objects[0]).unwrap();
    }
}

#[test]
fn a_change_that_may_still_be_in_progress_is_not_repeated() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    // The first attempt is not answered in time, and the second comes while the server still works on the first.
    relay.fail("PUT", "/images/", Fault::Refuse, 1);
    relay.fail("PUT", "/images/", Fault::Status(409), 1);
    let mut made = 0;
    let error = store.change(&name("a"), &mut |image| {
        made += 1;
        image.retire(1, true)
    });
    assert_eq!(made, 1);
    let error = error.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unknown, "{error}");
    assert!(error.to_string().contains("it is unknown whether"), "{error}");
    // If no earlier attempt is in doubt, the change is repeated.
    relay.fail("PUT", "/images/", Fault::Status(409), 1);
    store.change(&name("a"), &mut |image| image.retire(1, true)).unwrap();

    // The version may still appear, so the objects that it needs stay until the marks of its writer expire.
    relay.fail("PUT", "/images/", Fault::Refuse, 1);
    relay.fail("PUT", "/images/", Fault::Status(409), 1);
    let before = files(place.dir());
    publish(store.as_ref(), "a", b"object", &[], b"m").unwrap_err();
    assert_eq!(store.reclaim_left().unwrap(), 0);
    assert_eq!(files(place.dir()).len(), before.len() + 2);
    let writer = place.keys("locks").into_iter().find(|key| key.starts_with("writer-")).unwrap();
    make_older(&place.dir().join("locks").join(writer), Duration::from_secs(700));
    assert!(store.reclaim_left().unwrap() > 0);
    assert_eq!(files(place.dir()), before);
    assert_eq!(place.keys("locks"), [] as [&str; 0]);
}

#[test]
fn a_change_without_any_answer_is_looked_up() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    // The server made the change, and no answer arrived.
    relay.fail("PUT", "/images/", Fault::LoseAnswer, u32::MAX);
    publish(store.as_ref(), "a", b"two", &[], b"m2").unwrap();
    relay.heal();
    // The server refused the second attempt. That does not show what became of the first one.
    relay.fail("PUT", "/images/", Fault::LoseAnswer, 1);
    relay.fail("PUT", "/images/", Fault::Status(403), u32::MAX);
    store.change(&name("a"), &mut |image| image.retire(2, true)).unwrap();
    relay.heal();
    let image = store.image(&name("a")).unwrap().unwrap();
    assert_eq!(image.versions.len(), 2);
    assert_eq!(place.keys("locks"), [] as [&str; 0]);

    // The change cannot be looked up.
    relay.fail("PUT", "/images/", Fault::LoseAnswer, u32::MAX);
    relay.fail("GET", "/images/", Fault::Delay(Duration::ZERO), 1);
    relay.fail("GET", "/images/", Fault::Status(403), u32::MAX);
    let error = publish(store.as_ref(), "a", b"three", &[], b"m3").unwrap_err().to_string();
    assert!(error.contains("it is unknown whether image 'a'") && error.contains("5 times"), "{error}");
    relay.heal();
    assert_eq!(store.reclaim_left().unwrap(), 0);
    let version = store.resolve(&"a@3".parse().unwrap()).unwrap();
    store.manifest(version.manifest).unwrap();
    store.open_object(version.objects[0]).unwrap();

    // The change was not made, but may still be.
    relay.fail("PUT", "/images/", Fault::Refuse, u32::MAX);
    let error = publish(store.as_ref(), "a", b"four", &[], b"m4").unwrap_err().to_string();
    assert!(error.contains("it is unknown whether image 'a'"), "{error}");
    relay.heal();
    assert_eq!(store.reclaim_left().unwrap(), 0);
    store.manifest(Hash::of(b"m4")).unwrap();
}

#[test]
fn a_copy_names_the_image_with_an_uncertain_change() {
    let (place, relay, _) = behind_a_relay();
    let elsewhere = tempfile::tempdir().unwrap();
    let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for image in ["b", "c", "d"] {
        publish(&source, image, b"one", &[], b"m-one").unwrap();
    }
    let target = suite::writable(&place);
    let what = headwater_store::copy::everything(&source).unwrap();
    let objects_of = |_: &[u8]| Ok(vec![(Hash::of(b"one"), 3)]);
    let mut reported = Vec::new();
    let mut tell = |did: headwater_store::CopiedImage| {
        // The next change is refused. That does not show what became of its first attempt.
        relay.fail("PUT", "/images/", Fault::Refuse, 1);
        relay.fail("PUT", "/images/", Fault::Status(409), 1);
        reported.push(did);
    };
    let copied = headwater_store::copy_telling(
        &source,
        target.as_ref(),
        &what,
        &objects_of,
        true,
        (&mut |_| Ok(()), &mut tell),
    );
    assert_eq!(kind(copied), StoreErrorKind::Unknown);
    let [first, second] = &reported[..] else { panic!("{reported:?}") };
    assert_eq!((first.name.as_str(), &first.versions[..], first.tried.is_none()), ("b", &[1][..], true));
    assert_eq!((second.name.as_str(), &second.versions[..], second.is_followed), ("c", &[][..], false));
    assert_eq!(second.tried.as_ref().map(StoreError::kind), Some(StoreErrorKind::Unknown));
}

#[test]
fn a_write_that_fails_leaves_the_store_as_it_was() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    let before = files(place.dir());
    for target in ["/objects/", "/manifests/", "/images/"] {
        for fault in [Fault::Status(403), Fault::Status(500), Fault::Refuse] {
            if (target, fault) == ("/images/", Fault::Refuse) {
                // The client does not know whether the server received the request.
                continue;
            }
            relay.fail("PUT", target, fault, u32::MAX);
            let error = publish(store.as_ref(), "a", b"new object", &[], b"new").unwrap_err();
            assert_ne!(error.kind(), StoreErrorKind::Unknown, "{error}");
            assert!(error.to_string().contains("cannot write s3://"), "{error}");
            relay.heal();
            // What the failed write left was removed when it ended.
            assert_eq!(files(place.dir()), before, "{target} {fault:?}");
        }
    }
    publish(store.as_ref(), "a", b"new object", &[], b"new").unwrap();
}

#[test]
fn a_full_server_is_asked_once_and_reported_as_full() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    let before = files(place.dir());
    let quota = "XMinioAdminBucketQuotaExceeded";
    for (fault, says) in [
        (Fault::Status(507), "Injected"),
        (Fault::Refusal(403, "QuotaExceeded"), "QuotaExceeded"),
        (Fault::Refusal(400, quota), quota),
    ] {
        relay.take_seen();
        relay.fail("PUT", "/objects/", fault, u32::MAX);
        let full = publish(store.as_ref(), "a", b"new object", &[], b"new").unwrap_err();
        relay.heal();
        assert_eq!(full.kind(), StoreErrorKind::NoSpace, "{full}");
        let message = full.to_string();
        for word in ["cannot write s3://", says, "'headwater image remove'", "Raise the quota"] {
            assert!(message.contains(word), "{fault:?}: no '{word}' in: {message}");
        }
        assert!(!message.contains("AWS_ACCESS_KEY_ID") && !message.contains("times"), "{message}");
        let seen = relay.take_seen();
        let asked = seen.iter().filter(|it| it.starts_with("PUT") && it.contains("/objects/"));
        assert_eq!(asked.count(), 1, "{fault:?}: {seen:?}");
        assert_eq!(files(place.dir()), before, "{fault:?}");
    }
    publish(store.as_ref(), "a", b"new object", &[], b"new").unwrap();
    // A change of an image finds no space, and the channel does not move.
    let to = |version| Pointer { channel: Channel::Production, version, at_s: 7, author: "anna".into() };
    store.change(&name("a"), &mut |image| image.promote(to(1)).map(drop)).unwrap();
    let before = files(place.dir());
    let image = store.image(&name("a")).unwrap();
    relay.fail("PUT", "/images/", Fault::Status(507), u32::MAX);
    let full = store.change(&name("a"), &mut |image| image.promote(to(2)).map(drop));
    assert_eq!(kind(full), StoreErrorKind::NoSpace);
    assert_eq!(kind(store.remove(&name("a"), Some(2)).map(drop)), StoreErrorKind::NoSpace);
    relay.heal();
    assert_eq!((store.image(&name("a")).unwrap(), files(place.dir())), (image, before));
    store.remove(&name("a"), Some(2)).unwrap();
}
