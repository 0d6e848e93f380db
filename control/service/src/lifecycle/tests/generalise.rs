//! The identity of a machine stays out of versions that others boot.

use headwater_api::{SealRequest, Sealed};

use super::removals::Api;
use super::*;
use crate::answer::problem;

impl Fixture {
    /// A machine that edits the image, and whose guest is up.
    async fn editing() -> Self {
        let fixture = Self::new().await;
        fixture.edit().await;
        fixture.start().await.unwrap();
        fixture.host.boots.send_replace(true);
        until("it runs", async || fixture.record().await.state == MachineState::Running).await;
        fixture
    }

    async fn seal_session(&self, keep_identity: bool) -> Result<Sealed, LifecycleError> {
        let request = SealRequest { keep_identity, ..SealRequest::default() };
        self.service.seal_session("image", request, &Caller::daemon(), Arc::default()).await
    }

    /// A disk has this, and file systems that cannot be looked into.
    fn finds(&self, found: &[&str], unread: &[&str]) {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        *self.host.identity_left.lock().unwrap() =
            IdentityLeft { found: owned(found), unread: owned(unread) };
    }

    fn asked_of_guest(&self) -> Vec<&'static str> {
        self.host.freezes.lock().unwrap().clone()
    }
}

const KEY: &str = "/etc/ssh/ssh_host_ed25519_key";

#[tokio::test]
async fn a_seal_of_a_machine_that_is_on_generalises_and_switches_it_off() {
    let fixture = Fixture::editing().await;
    fixture.finds(&[KEY], &["partition 2 (XFS)"]);
    let sealed = fixture.seal_session(false).await.unwrap();
    assert_eq!((sealed.removed.as_slice(), sealed.identity.len()), (&["all of lab".to_owned()][..], 0));
    assert_eq!(sealed.not_looked_into, ["partition 2 (XFS)"]);
    assert!(!sealed.version.keeps_identity);
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Stopped));
    assert_eq!(*fixture.host.stops.lock().unwrap(), ["ACPI"]);
}

#[tokio::test]
async fn a_seal_also_removes_what_the_catalog_says() {
    let fixture = Fixture::new().await;
    fixture.in_catalog().await;
    fixture.edit().await;
    fixture.start().await.unwrap();
    fixture.host.boots.send_replace(true);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    let api = Api::serve(&fixture).await;
    let set = async |body: &str| api.ask("PATCH", "catalogs/lab", body).await;
    for (body, why) in [
        ("{}", "no change of the catalog was given"),
        (r#"{"seal_removes":["licence.key"]}"#, "absolute path"),
        (r#"{"seal_removes":["/a\nb"]}"#, "absolute path"),
        (r#"{"seal_removes":["//"]}"#, "absolute path"),
    ] {
        let (status, answer) = set(body).await;
        assert!(status == 400 && answer.contains(why), "{status} {answer}");
    }
    let (status, answer) = set(r#"{"seal_removes":["/srv/token","/etc/licence *.key"]}"#).await;
    assert!(status == 200 && answer.contains("/etc/licence *.key"), "{status} {answer}");
    let sealed = fixture.seal_session(false).await.unwrap();
    assert_eq!(sealed.removed, ["all of lab", "/srv/token", "/etc/licence *.key"]);
}

#[tokio::test]
async fn identity_on_the_disk_of_a_machine_that_is_off_refuses_its_seal() {
    let fixture = Fixture::editing().await;
    fixture.stop().await;
    fixture.finds(&[KEY], &[]);
    let refused = problem(&fixture.seal_session(false).await.unwrap_err());
    assert!(refused.kind == ProblemKind::Conflict && refused.message.contains(KEY), "{refused}");
    let advice = refused.advice.unwrap();
    assert!(advice.contains("machine start lab") && advice.contains("--keep-identity"), "{advice}");
    assert!(fixture.host.seals.lock().unwrap().is_empty());
    // Who keeps it needs no search, which may fail on this disk.
    fixture.host.looks_fail.store(true, Ordering::SeqCst);
    let sealed = fixture.seal_session(true).await.unwrap();
    assert!(sealed.version.keeps_identity && sealed.identity.is_empty(), "{sealed:?}");
    assert_eq!(fixture.asked_of_guest(), [] as [&str; 0]);
}

#[tokio::test]
async fn what_cannot_be_looked_into_marks_a_version_that_no_guest_generalised() {
    for (unread, is_marked) in [(&["partition 1 (LUKS)"][..], true), (&[], false)] {
        let fixture = Fixture::editing().await;
        fixture.stop().await;
        fixture.finds(&[], unread);
        let sealed = fixture.seal_session(false).await.unwrap();
        assert_eq!((sealed.version.keeps_identity, sealed.not_looked_into.len()), (is_marked, unread.len()));
    }
}

#[tokio::test]
async fn a_version_over_a_marked_one_is_marked_unless_the_guest_generalised() {
    for is_generalised in [false, true] {
        let fixture = Fixture::new().await;
        fixture.host.versions.lock().unwrap().iter_mut().for_each(|version| version.keeps_identity = true);
        fixture.edit().await;
        fixture.start().await.unwrap();
        fixture.host.boots.send_replace(true);
        until("it runs", async || fixture.record().await.state == MachineState::Running).await;
        if !is_generalised {
            fixture.stop().await;
        }
        let sealed = fixture.seal_session(false).await.unwrap();
        assert_eq!(sealed.version.keeps_identity, !is_generalised);
    }
}

#[tokio::test]
async fn a_copy_of_a_machine_over_a_marked_version_is_marked() {
    let fixture = Fixture::new().await;
    fixture.host.versions.lock().unwrap().iter_mut().for_each(|version| version.keeps_identity = true);
    fixture.start().await.unwrap();
    assert!(fixture.seal_machine().await.unwrap().version.keeps_identity);
}

#[tokio::test]
async fn a_guest_that_cannot_be_generalised_goes_on_and_so_does_its_edit() {
    let fixture = Fixture::editing().await;
    fixture.host.no_agent.store(true, Ordering::SeqCst);
    let refused = problem(&fixture.seal_session(false).await.unwrap_err());
    assert!(refused.to_string().contains("no agent answers"), "{refused}");
    assert!(refused.kind == ProblemKind::Conflict && refused.advice.unwrap().contains("machine stop lab"));
    assert_eq!(fixture.record().await.state, MachineState::Running);
    // Nor is one touched whose seal is refused in any case.
    fixture.host.no_agent.store(false, Ordering::SeqCst);
    assert!(matches!(fixture.seal_session(true).await, Err(LifecycleError::StillOn { .. })));
    fixture.next_version();
    assert!(matches!(fixture.seal_session(false).await, Err(LifecycleError::Newer { .. })));
    assert_eq!((fixture.asked_of_guest().len(), fixture.record().await.state), (0, MachineState::Running));
}

#[tokio::test]
async fn a_guest_that_does_not_switch_itself_off_is_not_sealed_in_the_same_breath() {
    let fixture = Fixture::editing().await;
    fixture.host.deaf.store(true, Ordering::SeqCst);
    let (service, button) = (fixture.service.clone(), fixture.host.button_pressed.notified());
    let sealing = tokio::spawn(async move {
        service.seal_session("image", SealRequest::default(), &Caller::daemon(), Arc::default()).await
    });
    button.await;
    fixture.host.vms.lock().unwrap().last().unwrap().end(VmExit::Killed);
    let refused = sealing.await.unwrap().unwrap_err();
    assert!(matches!(refused, LifecycleError::NotInOrder { .. }), "{refused}");
    assert!(fixture.host.seals.lock().unwrap().is_empty());
    // Once it is off, that is what there is.
    fixture.seal_session(false).await.unwrap();
}

#[tokio::test]
async fn a_version_of_a_machine_that_runs_is_marked_and_production_only_by_force() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.finds(&[KEY], &[]);
    let sealed = fixture.seal_machine().await.unwrap();
    assert!(sealed.version.keeps_identity && sealed.identity == [KEY], "{sealed:?}");
    let api = Api::serve(&fixture).await;
    let image = format!("images/image@{}/promotion", sealed.version.number);
    let promote = async |body: &str| api.ask("POST", &image, body).await;
    for body in [r#"{"channel":"production"}"#, r#"{"channel":"production","at_ms":99999999999000}"#] {
        let (status, answer) = promote(body).await;
        assert!(status == 409 && answer.contains("not generalised"), "{answer}");
    }
    assert_eq!(promote(r#"{"channel":"test"}"#).await.0, 200);
    assert_eq!(promote(r#"{"channel":"production","force":true}"#).await.0, 200);
}

#[tokio::test]
async fn a_kept_disk_with_identity_is_sealed_only_if_that_is_wanted() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    fixture.stop().await;
    fixture.finds(&[KEY], &[]);
    let refused = problem(&fixture.seal_machine().await.unwrap_err());
    assert!(refused.message.contains(KEY) && refused.advice.unwrap().contains("--keep-identity"));
    fixture.host.looks_fail.store(true, Ordering::SeqCst);
    let request = SealRequest { keep_identity: true, ..SealRequest::default() };
    let sealed =
        fixture.service.seal_machine("lab", request, &Caller::daemon(), Arc::default()).await.unwrap();
    assert!(sealed.version.keeps_identity);
}
