//! Seals of machines that run: what they ask of the guest, who need not wait for them, and what they are over.

use headwater_api::{SealRequest, Sealed, SetMachine};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

use super::*;
use crate::answer::problem;

/// What is waited for at most that is to come at once.
const AT_ONCE: Duration = Duration::from_secs(60);

/// Why a seal of a machine that ended is refused.
const ENDED: &str = "the machine was stopped or restarted before";

impl Fixture {
    /// Its machine's guest is up.
    async fn running() -> Self {
        let fixture = Self::new().await;
        fixture.start().await.unwrap();
        fixture.host.boots.send_replace(true);
        fixture.runs().await;
        fixture
    }

    async fn runs(&self) {
        until("it runs", async || self.record().await.state == MachineState::Running).await;
    }

    /// A seal of its machine, under way.
    fn sealing(&self) -> JoinHandle<Result<Sealed, LifecycleError>> {
        self.sealing_for(Arc::default())
    }

    fn sealing_for(&self, control: Arc<TaskControl>) -> JoinHandle<Result<Sealed, LifecycleError>> {
        let service = self.service.clone();
        tokio::spawn(async move {
            service.seal_machine("lab", SealRequest::default(), &Caller::daemon(), control).await
        })
    }

    /// The turn of its machine, for which a seal waits whose guest has just written out.
    async fn turn_before(&self) -> OwnedMutexGuard<()> {
        let uuid = self.record().await.uuid;
        self.host.exec_hangs.notified().await;
        let turn = self.service.lock(uuid).await;
        self.host.exec_goes_on.notify_one();
        until("the seal waits", async || self.service.at_turn(uuid) == 2).await;
        turn
    }

    /// What was done to the guest's file systems and to the disk.
    fn frozen(&self) -> Vec<&'static str> {
        self.host.freezes.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn a_seal_that_is_refused_asks_nothing_of_the_guest() {
    let fixture = Fixture::running().await;
    fixture.host.disks_read.store(true, Ordering::SeqCst);
    let refused = problem(&fixture.seal_machine().await.unwrap_err());
    assert!(refused.kind == ProblemKind::Conflict && refused.advice.is_some(), "{refused}");
    assert_eq!(fixture.frozen(), [] as [&str; 0]);

    // Nor while a version is made of the disk as it was.
    fixture.host.disks_read.store(false, Ordering::SeqCst);
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let sealing = fixture.sealing();
    fixture.host.seal_waits.notified().await;
    let refused = fixture.seal_machine().await.unwrap_err();
    assert!(matches!(refused, LifecycleError::BeingSealed { .. }), "{refused}");
    assert!(problem(&refused).advice.is_some(), "{refused}");
    assert_eq!(fixture.frozen(), ["write out", "freeze", "disk", "thaw"]);
    fixture.host.seals_wait.store(false, Ordering::SeqCst);
    fixture.host.seal_goes_on.notify_one();
    sealing.await.unwrap().unwrap();
    // It stands in nobody's way any more.
    fixture.seal_machine().await.unwrap();
}

#[tokio::test]
async fn a_guest_that_writes_out_for_long_keeps_nobody_from_its_machine() {
    let fixture = Fixture::running().await;
    fixture.host.execs_hang.store(true, Ordering::SeqCst);
    let caller = Caller::daemon();
    for resets in [true, false] {
        let sealing = fixture.sealing();
        fixture.host.exec_hangs.notified().await;
        // The write cache is full, and this is what lets the guest go on.
        let limits = SetMachine { disk_bytes: Some(20 << 30), ..SetMachine::default() };
        tokio::time::timeout(AT_ONCE, fixture.service.set_limits("lab", limits, &caller))
            .await
            .unwrap()
            .unwrap();
        let twice = tokio::time::timeout(AT_ONCE, fixture.seal_machine()).await.unwrap().unwrap_err();
        assert!(matches!(twice, LifecycleError::BeingSealed { .. }), "{twice}");
        let off = async {
            if resets {
                fixture.service.reset("lab", &caller).await
            } else {
                fixture.service.stop("lab", false, &caller).await
            }
        };
        tokio::time::timeout(AT_ONCE, off).await.unwrap().unwrap();
        let refused = tokio::time::timeout(AT_ONCE, sealing).await.unwrap().unwrap().unwrap_err();
        let refused = problem(&refused);
        assert!(refused.kind == ProblemKind::Conflict && refused.advice.is_some(), "{refused}");
        assert!(refused.to_string().contains(ENDED), "{refused}");
        if resets {
            fixture.runs().await;
        }
    }
    assert_eq!(fixture.frozen(), ["write out"; 2]);
    assert_eq!(fixture.host.seals.lock().unwrap().len(), 0);
    assert_eq!(fixture.open_disks(), 0);
}

#[tokio::test]
async fn a_guest_that_has_written_out_is_frozen_where_its_machine_is_on_still() {
    let fixture = Fixture::running().await;
    fixture.host.execs_hang.store(true, Ordering::SeqCst);
    let sealing = fixture.sealing();
    // Somebody changes the machine in the moment when it has.
    let turn = fixture.turn_before().await;
    assert_eq!(fixture.frozen(), ["write out"]);
    drop(turn);
    assert_eq!(sealing.await.unwrap().unwrap().version.number, 2);
    assert_eq!(fixture.frozen(), ["write out", "freeze", "disk", "thaw"]);
}

#[tokio::test]
async fn a_machine_that_ends_before_its_disk_is_frozen_is_not_sealed() {
    let fixture = Fixture::running().await;
    fixture.host.execs_hang.store(true, Ordering::SeqCst);
    let starts = || fixture.host.vms.lock().unwrap().len();
    // Its turn is free in the moment when it ends, and the seal comes before whoever notes that; or somebody goes on having it.
    for (count, is_free) in [(1, true), (2, false)] {
        until("it is on", async || starts() == count).await;
        fixture.runs().await;
        let sealing = fixture.sealing();
        let mut turn = Some(fixture.turn_before().await);
        fixture.vm().end(VmExit::Rebooted);
        if is_free {
            turn = None;
        }
        let refused = tokio::time::timeout(AT_ONCE, sealing).await.unwrap().unwrap().unwrap_err();
        let refused = problem(&refused);
        assert!(refused.kind == ProblemKind::Conflict && refused.to_string().contains(ENDED), "{refused}");
        drop(turn);
    }
    assert_eq!(fixture.frozen(), ["write out"; 2]);
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_machine_that_is_not_up_and_ends_is_not_sealed_before_that_is_noted() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let uuid = fixture.record().await.uuid;
    let turn = fixture.service.lock(uuid).await;
    let sealing = fixture.sealing();
    until("the seal waits", async || fixture.service.at_turn(uuid) == 2).await;
    fixture.vm().end(VmExit::PoweredOff);
    drop(turn);
    let refused = problem(&sealing.await.unwrap().unwrap_err());
    assert!(refused.kind == ProblemKind::Conflict && refused.to_string().contains(ENDED), "{refused}");
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_seal_that_nobody_waits_for_does_not_wait_for_its_turn() {
    let fixture = Fixture::running().await;
    fixture.host.execs_hang.store(true, Ordering::SeqCst);
    let control = Arc::new(TaskControl::default());
    let sealing = fixture.sealing_for(Arc::clone(&control));
    let turn = fixture.turn_before().await;
    control.cancel();
    let ended = tokio::time::timeout(AT_ONCE, sealing).await.unwrap().unwrap().unwrap_err();
    assert_eq!(problem(&ended).kind, ProblemKind::Cancelled, "{ended}");
    drop(turn);
    // Nor does it ask anything of the guest where its turn comes in that moment.
    let control = Arc::new(TaskControl::default());
    let sealing = fixture.sealing_for(Arc::clone(&control));
    let turn = fixture.turn_before().await;
    control.cancel();
    drop(turn);
    let ended = sealing.await.unwrap().unwrap_err();
    assert_eq!(problem(&ended).kind, ProblemKind::Cancelled, "{ended}");
    assert_eq!(fixture.frozen(), ["write out"; 2]);
}

#[tokio::test]
async fn a_guest_whose_writes_wait_when_it_has_written_out_is_not_frozen() {
    let fixture = Fixture::running().await;
    fixture.host.disks_full.store(true, Ordering::SeqCst);
    let pause = fixture.seal_machine().await.unwrap().pause.unwrap();
    let remark = pause.remark.as_deref();
    assert!(remark.is_some_and(|remark| remark.contains("its disk is full")), "{pause:?}");
    assert_eq!((pause.guest_ms, fixture.frozen()), (None, vec!["write out", "disk"]));
    fixture.host.disks_full.store(false, Ordering::SeqCst);
    let pause = fixture.seal_machine().await.unwrap().pause.unwrap();
    assert_eq!((pause.guest_ms.is_some(), pause.remark), (true, None));
}

#[tokio::test]
async fn a_machine_is_sealed_over_the_number_that_it_runs_where_others_have_its_hash() {
    let fixture = Fixture::new().await;
    fixture.edit().await;
    fixture.start().await.unwrap();
    // Another version, and then the first one once more.
    fixture.next_version();
    let again = ImageVersion { hash: version(1, "").hash, ..version(3, "") };
    fixture.host.versions.lock().unwrap().push(again);
    let refused = fixture.seal_machine().await.unwrap_err();
    let told = "cannot seal machine 'lab' over image@1: image@3 is newer";
    assert!(refused.to_string().starts_with(told), "{refused}");
    // So is one that edits nothing, whichever of the numbers is retired.
    fixture.stop().await;
    fixture.service.discard_session("image", &Caller::daemon()).await.unwrap();
    *fixture.host.production.lock().unwrap() = Some(1);
    fixture.start().await.unwrap();
    fixture.host.versions.lock().unwrap()[2].retired = true;
    let sealed = fixture.seal_machine().await.unwrap();
    assert_eq!((sealed.parent.as_str(), sealed.newer.as_deref()), ("image@1", Some("image@2")));
    let source = fixture.host.seals.lock().unwrap()[0].source.clone();
    assert_eq!(source, "image@1 as machine lab had it");
    // Where the number is gone, its hash is looked for.
    *fixture.host.hidden.lock().unwrap() = Some("image@1".to_owned());
    assert_eq!(fixture.seal_machine().await.unwrap().parent, "image@3");
}
