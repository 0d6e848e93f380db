//! Disks that are kept, edits and seals: who has which disk over which version, and what is left when things go wrong.

use headwater_api::SealRequest;
use headwater_db::{NewEvent, PersistentDisk, Purpose};

use super::removals::Api;
use super::*;
use crate::answer::problem;
use crate::backend::RetentionPurpose;
use crate::lifecycle::OfflineDisk;

impl Fixture {
    /// Makes its machine's write cache persistent.
    pub(super) async fn persistent() -> Self {
        Self::with_cache(|cache| cache.persistent = true).await
    }

    async fn with_cache(change: impl FnOnce(&mut CacheSettings)) -> Self {
        let fixture = Self::new().await;
        let mut record = fixture.record().await;
        change(&mut record.cache);
        let mut repo = fixture.db.write().await.unwrap();
        repo.machines().remove(record.uuid).await.unwrap();
        repo.machines().add(&record).await.unwrap();
        repo.save().await.unwrap();
        fixture
    }

    pub(super) async fn second_machine(&self) {
        let new = crate::identity::make(&SystemRandom, "desk", None).unwrap();
        let uuid = new.uuid;
        let record = MachineRecord { uuid, name: "desk".to_owned(), mac: new.mac, ..self.record().await };
        let mut repo = self.db.write().await.unwrap();
        repo.machines().add(&record).await.unwrap();
        repo.save().await.unwrap();
    }

    pub(super) async fn stop(&self) {
        self.service.stop("lab", false, &Caller::daemon()).await.unwrap();
    }

    async fn kept(&self) -> Vec<PersistentDisk> {
        self.db.read().await.unwrap().persistent_disks().list().await.unwrap()
    }

    pub(super) fn next_version(&self) {
        let mut versions = self.host.versions.lock().unwrap();
        let number = versions.len() as u64 + 1;
        versions.push(version(number, ""));
    }

    fn last_opened(&self) -> (Option<Uuid>, u64, CacheMode) {
        *self.host.opened.lock().unwrap().last().unwrap()
    }

    /// Makes the machine one of the catalog `lab`.
    pub(super) async fn in_catalog(&self) {
        let mut record = self.record().await;
        let mut repo = self.db.write().await.unwrap();
        let catalog = headwater_db::CatalogRecord {
            name: "lab".to_owned(),
            image: "image".to_owned(),
            pin: None,
            scheme: 1,
            cache: record.cache,
            transport: record.transport,
            memory_bytes: record.memory_bytes,
            cpus: record.cpus,
            user_data: None,
            name_rule: "lab-##".to_owned(),
            first_number: 1,
            seal_removes: Vec::new(),
            on_host_loss: headwater_api::OnHostLoss::Wait,
            cloud: None,
            platform: record.platform.clone(),
            keep_ready: 0,
            ready_hours: None,
            stop_idle_s: 0,
            created_at_ms: 0,
        };
        repo.catalogs().add(&catalog).await.unwrap();
        record.catalog = Some("lab".to_owned());
        repo.machines().remove(record.uuid).await.unwrap();
        repo.machines().add(&record).await.unwrap();
        repo.save().await.unwrap();
    }

    pub(super) async fn edit(&self) -> PersistentDisk {
        self.service.edit_image("image", "lab", &Caller::daemon()).await.unwrap().0
    }

    async fn seal(&self) -> Result<headwater_api::Sealed, LifecycleError> {
        self.seal_with(false).await
    }

    async fn seal_with(&self, over_newer: bool) -> Result<headwater_api::Sealed, LifecycleError> {
        let control = Arc::new(TaskControl::default());
        let request = SealRequest { note: "a note".to_owned(), over_newer, ..SealRequest::default() };
        self.service.seal_session("image", request, &Caller::daemon(), control).await
    }

    /// What a seal of an edit asks for now.
    async fn order_of(&self, edit: &PersistentDisk) -> SealOrder {
        SealOrder {
            source: crate::lifecycle::maintenance::source(edit, &self.record().await),
            note: String::new(),
            author: String::new(),
            newest_at_most: None,
            is_edit: true,
            keeps_identity: false,
        }
    }

    pub(super) async fn seal_machine(&self) -> Result<headwater_api::Sealed, LifecycleError> {
        let control = Arc::new(TaskControl::default());
        self.service.seal_machine("lab", SealRequest::default(), &Caller::daemon(), control).await
    }

    pub(super) async fn view(&self) -> headwater_api::Machine {
        self.service.full_view(self.record().await).await.unwrap()
    }
}

#[tokio::test]
async fn a_persistent_machine_keeps_disk_and_version_until_it_is_reset() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    let (Some(disk), 1, _) = fixture.last_opened() else { panic!("no persistent disk") };
    fixture.next_version();
    let view = fixture.view().await;
    assert!(view.old && view.next_version.as_deref() == Some("image@1"), "{view:?}");
    // A restart of the guest, and a stop.
    fixture.vm().end(VmExit::Rebooted);
    until("it has started again", async || fixture.host.vms.lock().unwrap().len() == 2).await;
    assert_eq!(fixture.last_opened(), (Some(disk), 1, CacheMode::RamDisk));
    until("its start is over", async || fixture.record().await.state == MachineState::Booting).await;
    fixture.stop().await;
    let view = fixture.view().await;
    assert!(view.old && view.kept.as_deref() == Some("image@1"), "{view:?}");
    // Another daemon leaves the disk alone.
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    again.recover().await.unwrap();
    assert_eq!(*fixture.host.kept_by_sweep.lock().unwrap(), [disk]);

    fixture.service.reset("lab", &Caller::daemon()).await.unwrap();
    assert_eq!(*fixture.host.discarded.lock().unwrap(), [disk]);
    let view = fixture.view().await;
    assert!(view.old && view.kept.is_none() && view.next_version.as_deref() == Some("image@2"), "{view:?}");
    fixture.start().await.unwrap();
    let (Some(other), 2, _) = fixture.last_opened() else { panic!("{:?}", fixture.last_opened()) };
    assert_ne!(other, disk);
    // Removing the machine removes it, also while it is on.
    fixture.service.remove("lab", true, &Caller::daemon()).await.unwrap();
    assert_eq!(*fixture.host.discarded.lock().unwrap(), [disk, other]);
    assert_eq!(fixture.kept().await, []);
}

#[tokio::test]
async fn a_machine_that_never_ran_is_tied_to_no_version() {
    let fixture = Fixture::persistent().await;
    fixture.host.start_fails.store(true, Ordering::SeqCst);
    fixture.start().await.unwrap_err();
    assert_eq!((fixture.kept().await, fixture.host.discarded.lock().unwrap().len()), (Vec::new(), 1));
    fixture.host.start_fails.store(false, Ordering::SeqCst);
    fixture.next_version();
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened().1, 2);
    fixture.stop().await;
    // Where it did run, a start that fails costs nothing.
    fixture.host.start_fails.store(true, Ordering::SeqCst);
    fixture.start().await.unwrap_err();
    assert_eq!(fixture.kept().await.len(), 1);
}

#[tokio::test]
async fn a_start_that_fails_says_why_and_leaves_no_secrets_also_where_that_cannot_be_noted() {
    let fixture = Fixture::persistent().await;
    fixture.host.start_fails.store(true, Ordering::SeqCst);
    // The disk is noted, and the start.
    *fixture.db.room.lock().unwrap() = Some(2);
    let error = problem(&fixture.start().await.unwrap_err()).to_string();
    assert!(error.contains("cannot start machine 'lab': not in this test"), "{error}");
    let seed = fixture.dir.path().join("run/lab/seed.img");
    assert!(seed.parent().is_some_and(Path::exists) && !seed.exists(), "its keys are left");
    assert_eq!(fixture.open_disks(), 0);
    *fixture.db.room.lock().unwrap() = None;
    fixture.host.start_fails.store(false, Ordering::SeqCst);
    fixture.start().await.unwrap();
}

#[tokio::test]
async fn a_machine_that_is_started_again_is_not_off_for_an_edit_or_a_removal() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    *fixture.host.unreadable.lock().unwrap() = Some("image".to_owned());
    fixture.vm().end(VmExit::Rebooted);
    until("it is said why", async || fixture.record().await.reason.is_some()).await;
    let caller = Caller::daemon();
    let edited = fixture.service.edit_image("image", "lab", &caller).await.unwrap_err();
    assert!(matches!(edited, LifecycleError::StillOn { .. }), "{edited}");
    let removed = fixture.service.remove("lab", false, &caller).await.unwrap_err();
    assert!(matches!(removed, LifecycleError::NotOff { .. }), "{removed}");
    assert!(problem(&removed).to_string().contains("off only until its restart"), "{removed}");
    fixture.stop().await;
    fixture.edit().await;
    fixture.service.discard_session("image", &caller).await.unwrap();
    fixture.service.remove("lab", false, &caller).await.unwrap();
}

#[tokio::test]
async fn a_first_start_that_breaks_off_ties_a_machine_to_no_version() {
    let fixture = Fixture::persistent().await;
    // The disk is noted, and the start is not.
    *fixture.db.room.lock().unwrap() = Some(1);
    fixture.start().await.unwrap_err();
    assert_eq!((fixture.kept().await.len(), fixture.host.opened.lock().unwrap().len()), (1, 0));
    *fixture.db.room.lock().unwrap() = None;
    fixture.next_version();
    fixture.start().await.unwrap();
    assert_eq!((fixture.last_opened().1, fixture.kept().await.len()), (2, 1));
    fixture.stop().await;

    // A machine that ran keeps what it wrote, also where that it ran could not be noted.
    fixture.service.reset("lab", &Caller::daemon()).await.unwrap();
    *fixture.db.room.lock().unwrap() = Some(2);
    fixture.start().await.unwrap_err();
    assert_eq!((fixture.kept().await[0].is_begun, fixture.open_disks()), (false, 1));
    *fixture.db.room.lock().unwrap() = None;
    fixture.stop().await;
    fixture.next_version();
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened().1, 2);
}

#[tokio::test]
async fn a_shared_store_is_told_before_the_database_and_agrees_with_it_afterwards() {
    let fixture = Fixture::persistent().await;
    let host = &fixture.host;
    host.is_shared.store(true, Ordering::SeqCst);
    let held_for = |follows: bool| {
        let holds = host.holds.lock().unwrap();
        let chosen = holds.iter().filter(|root| (root.purpose == RetentionPurpose::Follow) == follows);
        chosen.map(|root| root.id.clone()).collect::<Vec<_>>()
    };
    let held = || held_for(false);
    host.holds_fail.store(true, Ordering::SeqCst);
    fixture.start().await.unwrap_err();
    assert!(fixture.service.edit_image("image", "lab", &Caller::daemon()).await.is_err());
    assert_eq!(fixture.kept().await, []);
    host.holds_fail.store(false, Ordering::SeqCst);
    fixture.start().await.unwrap();
    fixture.stop().await;
    let disk = [fixture.kept().await[0].id.to_string()];
    assert_eq!(held(), disk);

    // One that a crash left, and one that was never set, as by an earlier release.
    let left = RetentionRoot { id: "left".to_owned(), ..host.holds.lock().unwrap().remove(0) };
    host.holds.lock().unwrap().push(left);
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    again.recover().await.unwrap();
    assert_eq!((held(), held_for(true)), (disk.to_vec(), vec!["image".to_owned()]), "it follows its image");
    // One that could not be taken away goes later.
    host.holds_fail.store(true, Ordering::SeqCst);
    fixture.service.reset("lab", &Caller::daemon()).await.unwrap();
    assert_eq!((fixture.kept().await, held()), (Vec::new(), disk.to_vec()));
    host.holds_fail.store(false, Ordering::SeqCst);
    fixture.service.roots_due().await;
    assert_eq!(held(), [] as [String; 0]);
    // An edit is held as one, and as a disk.
    fixture.edit().await;
    assert_eq!(held().len(), 2);
    fixture.service.discard_session("image", &Caller::daemon()).await.unwrap();
    assert_eq!(held(), [] as [String; 0]);
}

#[tokio::test]
async fn one_machine_edits_an_image_until_it_is_sealed() {
    let fixture = Fixture::new().await;
    fixture.second_machine().await;
    fixture.start().await.unwrap();
    let on = fixture.service.edit_image("image", "lab", &Caller::daemon()).await.unwrap_err();
    assert!(matches!(on, LifecycleError::StillOn { .. }), "{on}");
    fixture.stop().await;
    let edit = fixture.edit().await;
    let held = fixture.service.edit_image("image", "desk", &Caller::daemon()).await.unwrap_err();
    assert!(matches!(&held, LifecycleError::Held { holder, .. } if holder == "lab"), "{held}");
    let twice = fixture.service.edit_image("other", "lab", &Caller::daemon()).await.unwrap_err();
    assert!(matches!(twice, LifecycleError::Edits { .. }), "{twice}");
    // What the everyday commands would destroy.
    let caller = Caller::daemon();
    assert!(matches!(fixture.service.reset("lab", &caller).await, Err(LifecycleError::Edits { .. })));
    assert!(matches!(fixture.service.remove("lab", true, &caller).await, Err(LifecycleError::Edits { .. })));

    fixture.next_version();
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened(), (Some(edit.id), 1, CacheMode::RamDisk));
    let view = fixture.view().await;
    assert!(!view.old && view.edits.as_deref() == Some("image@1"), "{view:?}");
    // Its guest is not up yet, and can remove nothing.
    let busy = fixture.seal_with(true).await.unwrap_err();
    assert!(matches!(busy, LifecycleError::StillOn { .. }), "{busy}");
    assert!(matches!(
        fixture.service.discard_session("image", &caller).await,
        Err(LifecycleError::StillOn { .. })
    ));
    fixture.stop().await;
    let sealed = fixture.seal_with(true).await.unwrap();
    assert_eq!((sealed.version.number, sealed.parent.as_str()), (3, "image@1"));
    let order = fixture.host.seals.lock().unwrap()[0].clone();
    assert!(order.note == "a note" && order.source.starts_with("image@1 edited by machine lab"), "{order:?}");
    assert!(order.is_edit);
    assert_eq!(
        (fixture.kept().await, fixture.host.discarded.lock().unwrap().clone()),
        (Vec::new(), vec![edit.id])
    );
    assert!(matches!(fixture.seal().await, Err(LifecycleError::NoEdit { .. })));
    // Nobody has promoted it yet.
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened(), (None, 2, CacheMode::RamDisk));
}

#[tokio::test]
async fn what_is_sealed_is_booted_once_it_is_promoted() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let sealed = fixture.seal_machine().await.unwrap();
    assert_eq!((sealed.version.number, sealed.production), (2, Some(1)));
    let view = fixture.view().await;
    assert!(!view.old && view.next_version.as_deref() == Some("image@1"), "{view:?}");
    let noted = |event: &headwater_api::Event| {
        event.action == "promoted" && event.detail.starts_with("production to version 1")
    };
    assert!(fixture.events().await.iter().any(noted));
    // There is no edit to give up.
    assert!(!fixture.host.seals.lock().unwrap()[0].is_edit);
    assert_eq!(fixture.seal_machine().await.unwrap().production, None);
}

#[tokio::test]
async fn nobody_reads_a_kept_disk_of_a_machine_that_went_off_while_a_version_is_made_of_it() {
    let fixture = Fixture::persistent().await;
    fixture.second_machine().await;
    fixture.start().await.unwrap();
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let service = fixture.service.clone();
    let sealing = tokio::spawn(async move {
        service.seal_machine("lab", SealRequest::default(), &Caller::daemon(), Arc::default()).await
    });
    fixture.host.seal_waits.notified().await;
    fixture.stop().await;
    let refused = fixture.service.readable_disk("lab").await.unwrap_err();
    assert!(matches!(refused, LifecycleError::BeingSealed { .. }), "{refused}");
    // It hides itself, and no other machine.
    let listed = fixture.service.readable_disks().await.unwrap();
    assert!(listed.len() == 2 && listed.iter().all(|it| matches!(it.disk, OfflineDisk::None)), "{listed:?}");
    fixture.host.seals_wait.store(false, Ordering::SeqCst);
    fixture.host.seal_goes_on.notify_one();
    sealing.await.unwrap().unwrap();
    let found = fixture.service.readable_disk("lab").await.unwrap().unwrap();
    assert!(matches!(found.disk, OfflineDisk::PersistentDiskRef(_)), "{found:?}");
}

#[tokio::test]
async fn what_came_since_an_edit_began_is_not_left_out_unless_that_is_wanted() {
    let fixture = Fixture::new().await;
    fixture.edit().await;
    fixture.start().await.unwrap();
    // What is made of the edit itself is in it, and stands in nobody's way.
    let so_far = fixture.seal_machine().await.unwrap();
    assert_eq!((so_far.version.number, &so_far.newer), (2, &None));
    fixture.next_version();
    let machine = fixture.seal_machine().await.unwrap_err();
    fixture.stop().await;
    let image = fixture.seal().await.unwrap_err();
    for (refused, what) in [(machine, "machine 'lab'"), (image, "image 'image'")] {
        assert!(matches!(refused, LifecycleError::Newer { .. }), "{refused}");
        let told = format!("cannot seal {what} over image@1: image@3 is newer");
        assert!(refused.to_string().starts_with(&told), "{refused}");
    }
    // One that comes while the disk is being read.
    fixture.host.versions.lock().unwrap()[2].retired = true;
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let service = fixture.service.clone();
    let sealing = tokio::spawn(async move {
        service.seal_session("image", SealRequest::default(), &Caller::daemon(), Arc::default()).await
    });
    fixture.host.seal_waits.notified().await;
    fixture.next_version();
    fixture.host.seals_wait.store(false, Ordering::SeqCst);
    fixture.host.seal_goes_on.notify_one();
    let late = sealing.await.unwrap().unwrap_err();
    assert!(late.to_string().contains("image@4 is newer"), "{late}");

    let sealed = fixture.seal_with(true).await.unwrap();
    assert_eq!((sealed.version.number, sealed.newer.as_deref()), (5, Some("image@4")));
    assert_eq!(fixture.kept().await, []);
}

#[tokio::test]
async fn a_discarded_edit_leaves_no_trace() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    let own = fixture.last_opened();
    fixture.stop().await;
    let edit = fixture.edit().await;
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened().0, Some(edit.id));
    fixture.stop().await;
    let console = fixture.dir.path().join("run/lab/console.log");
    assert!(console.exists(), "for who asks what happened");
    fixture.service.discard_session("image", &Caller::daemon()).await.unwrap();
    assert!(!console.exists());
    assert_eq!(*fixture.host.discarded.lock().unwrap(), [edit.id]);
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 1);
    // Its own disk waited.
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened(), own);
}

#[tokio::test]
async fn a_daemon_that_dies_between_version_and_end_of_an_edit_is_made_up_for() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    // As far as a seal gets before the database knows of it.
    let order = fixture.order_of(&edit).await;
    let control = Arc::new(TaskControl::default());
    Box::new(FakeFrozen(fixture.host.clone())).seal(order, control).await.unwrap();
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    again.recover().await.unwrap();
    assert_eq!(
        (fixture.kept().await, fixture.host.discarded.lock().unwrap().clone()),
        (Vec::new(), vec![edit.id])
    );
    assert_eq!(fixture.host.versions.lock().unwrap().len(), 2);
    // An edit that was not sealed goes on.
    let edit = fixture.edit().await;
    again.recover().await.unwrap();
    assert_eq!(*fixture.host.kept_by_sweep.lock().unwrap(), [edit.id]);
    // And a database that failed at the last step is made up for by the next seal, without another version.
    let order = fixture.order_of(&edit).await;
    Box::new(FakeFrozen(fixture.host.clone())).seal(order, Arc::default()).await.unwrap();
    assert_eq!(fixture.seal().await.unwrap().version.number, 3);
    assert_eq!((fixture.kept().await, fixture.host.versions.lock().unwrap().len()), (Vec::new(), 3));
}

#[tokio::test]
async fn a_database_that_knows_no_machine_has_no_kept_disk_removed() {
    let fixture = Fixture::persistent().await;
    fixture.host.keys.lock().unwrap().push("keys/disk-1".into());
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    // It knows one: what it does not know of its disks is left over.
    again.recover().await.unwrap();
    let mut repo = fixture.db.write().await.unwrap();
    let uuid = repo.machines().by_name("lab").await.unwrap().unwrap().uuid;
    repo.machines().remove(uuid).await.unwrap();
    repo.save().await.unwrap();
    fixture.host.kept_by_sweep.lock().unwrap().push(uuid);
    let refused = again.recover().await.unwrap_err().to_string();
    assert!(refused.contains("keys/disk-1") && refused.contains("restore the database"), "{refused}");
    assert_eq!(*fixture.host.kept_by_sweep.lock().unwrap(), [uuid], "it swept");
    // One whose last machine was removed has a history, and what a crash left of that machine's disk is swept.
    let mut repo = fixture.db.write().await.unwrap();
    let removed = NewEvent {
        caller: String::new(),
        action: "removed".into(),
        subject: "machine lab".into(),
        detail: String::new(),
        change: None,
        at_ms: 1,
    };
    repo.events().append(removed).await.unwrap();
    repo.save().await.unwrap();
    again.recover().await.unwrap();
}

#[tokio::test]
async fn an_edit_of_a_damaged_image_keeps_no_daemon_from_starting() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    fixture.host.damaged.store(true, Ordering::SeqCst);
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    again.recover().await.unwrap();
    assert_eq!(*fixture.host.kept_by_sweep.lock().unwrap(), [edit.id]);
    // Nobody knows whether it was sealed.
    fixture.start().await.unwrap_err();
    assert_eq!(fixture.kept().await, [edit]);
    assert!(fixture.host.opened.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_disk_that_was_sealed_takes_no_more_work_where_its_edit_could_not_be_ended() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    fixture.start().await.unwrap();
    fixture.stop().await;
    let edit = PersistentDisk { is_begun: true, ..edit };
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let sealing = tokio::spawn({
        let service = fixture.service.clone();
        async move {
            service.seal_session("image", SealRequest::default(), &Caller::daemon(), Arc::default()).await
        }
    });
    fixture.host.seal_waits.notified().await;
    fixture.db.fails.store(true, Ordering::SeqCst);
    fixture.host.seal_goes_on.notify_one();
    let failed = sealing.await.unwrap().unwrap_err();
    fixture.db.fails.store(false, Ordering::SeqCst);
    assert!(failed.to_string().contains("sealed as image@2"), "{failed}");
    assert_eq!(fixture.kept().await, std::slice::from_ref(&edit));

    let over = fixture.start().await.unwrap_err();
    assert!(matches!(&over, LifecycleError::EditOver { version, .. } if version == "image@2"), "{over}");
    assert_eq!(fixture.kept().await, []);
    assert_eq!(fixture.host.opened.lock().unwrap().len(), 1);
    assert_eq!(*fixture.host.discarded.lock().unwrap(), [edit.id]);
    assert!(matches!(fixture.seal().await, Err(LifecycleError::NoEdit { .. })));
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened(), (None, 1, CacheMode::RamDisk));
}

#[tokio::test]
async fn what_a_machine_does_after_a_seal_that_shows_late_is_sealed_too() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    fixture.start().await.unwrap();
    fixture.stop().await;
    // The store does not say whether it took the version, and shows it when the machine has worked on.
    let order = fixture.order_of(&edit).await;
    let before = fixture.record().await.started_at_ms;
    until("the clock goes on", async || Some(fixture.service.now_ms()) > before).await;
    fixture.start().await.unwrap();
    Box::new(FakeFrozen(fixture.host.clone())).seal(order, Arc::default()).await.unwrap();
    fixture.stop().await;
    // Neither the next daemon nor the next start takes its disk away.
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    again.recover().await.unwrap();
    fixture.start().await.unwrap();
    assert_eq!(fixture.last_opened().0, Some(edit.id));
    fixture.stop().await;
    let sealed = fixture.seal().await.unwrap();
    assert_eq!((sealed.version.number, sealed.newer, sealed.changed_bytes), (3, None, 4096));
    assert_eq!(fixture.kept().await, []);
}

#[tokio::test]
async fn a_seal_of_an_earlier_release_ends_the_edit_where_it_is_from_after_the_last_start() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    fixture.start().await.unwrap();
    fixture.stop().await;
    // It did not name the start.
    let source = format!("image@1 edited by machine lab, disk {}", edit.id);
    let show = |number, created_at_ms| {
        let sealed = ImageVersion { created_at_ms, ..version(number, &source) };
        fixture.host.versions.lock().unwrap().push(sealed);
    };
    let start_ms = fixture.record().await.started_at_ms.unwrap();
    // Versions have whole seconds.
    let second_ms = start_ms - start_ms % 1000;
    show(2, second_ms - 1000);
    show(3, second_ms);
    fixture.service.end_sealed_sessions().await.unwrap();
    assert_eq!(fixture.kept().await.len(), 1);
    show(4, second_ms + 1000);
    fixture.service.end_sealed_sessions().await.unwrap();
    assert_eq!(fixture.kept().await, []);
    assert_eq!(*fixture.host.discarded.lock().unwrap(), [edit.id]);
}

#[tokio::test]
async fn a_store_that_hides_an_image_does_not_say_that_its_edit_was_not_sealed() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    let order = fixture.order_of(&edit).await;
    Box::new(FakeFrozen(fixture.host.clone())).seal(order, Arc::default()).await.unwrap();
    fixture.host.image_hides.store(true, Ordering::SeqCst);
    for refused in [fixture.start().await.map(drop), fixture.seal().await.map(drop)] {
        let refused = problem(&refused.unwrap_err());
        assert!(
            refused.to_string().contains("no image 'image', although it has a maintenance session"),
            "{refused}"
        );
    }
    assert!(fixture.host.opened.lock().unwrap().is_empty());
    assert_eq!(fixture.kept().await, [edit]);
    fixture.host.image_hides.store(false, Ordering::SeqCst);
    assert_eq!(fixture.seal().await.unwrap().version.number, 2);
}

#[tokio::test]
async fn what_the_store_said_before_a_seal_of_an_edit_is_outdated() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    let is_outdated = async || fixture.service.store_figures().await.outdated;
    until("the store has answered", async || !is_outdated().await).await;
    fixture.host.away.store(true, Ordering::SeqCst);
    fixture.service.end_session(&edit, "lab", &version(2, ""), &Caller::daemon()).await.unwrap();
    // The store does not answer, and what it said before the seal is old.
    assert!(is_outdated().await);
}

#[tokio::test]
async fn nobody_opens_a_disk_that_a_version_is_being_made_of() {
    let fixture = Fixture::new().await;
    fixture.edit().await;
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let control = Arc::new(TaskControl::default());
    let sealing = tokio::spawn({
        let (service, control) = (fixture.service.clone(), control.clone());
        async move { service.seal_session("image", SealRequest::default(), &Caller::daemon(), control).await }
    });
    fixture.host.seal_waits.notified().await;
    let refused = fixture.start().await.unwrap_err();
    assert!(matches!(refused, LifecycleError::BeingSealed { .. }), "{refused}");
    assert!(matches!(fixture.seal().await, Err(LifecycleError::BeingSealed { .. })));
    assert!(matches!(
        fixture.service.discard_session("image", &Caller::daemon()).await,
        Err(LifecycleError::BeingSealed { .. })
    ));
    // The client hangs up: nothing has happened.
    control.cancel();
    fixture.host.seal_goes_on.notify_one();
    assert!(sealing.await.unwrap().is_err());
    assert_eq!((fixture.kept().await.len(), fixture.host.versions.lock().unwrap().len()), (1, 1));
    fixture.start().await.unwrap();
}

#[tokio::test]
async fn a_machine_that_runs_is_sealed_between_freeze_and_thaw_of_its_guest() {
    let fixture = Fixture::new().await;
    let off = fixture.seal_machine().await.unwrap_err();
    assert!(matches!(off, LifecycleError::NotOn { .. }), "{off}");
    fixture.start().await.unwrap();
    fixture.next_version();
    // The guest is not up yet.
    let sealed = fixture.seal_machine().await.unwrap();
    assert_eq!((sealed.version.number, sealed.parent.as_str()), (3, "image@1"));
    assert!(sealed.pause.unwrap().remark.unwrap().contains("has not booted"));
    let mut record = fixture.record().await;
    record.state = MachineState::Running;
    fixture.service.save(&record, &Caller::daemon(), "state", "up").await.unwrap();
    let sealed = fixture.seal_machine().await.unwrap();
    // What the guest takes to freeze is part of the pause, whatever else is.
    assert!(u128::from(sealed.pause.unwrap().guest_ms.unwrap()) >= FREEZING.as_millis());
    assert_eq!(*fixture.host.freezes.lock().unwrap(), ["disk", "write out", "freeze", "disk", "thaw"]);
    fixture.host.no_agent.store(true, Ordering::SeqCst);
    let pause = fixture.seal_machine().await.unwrap().pause.unwrap();
    assert!(pause.guest_ms.is_none() && pause.remark.unwrap().contains("no agent"));
    assert_eq!((fixture.record().await.state, fixture.open_disks()), (MachineState::Running, 1));
}

#[tokio::test]
async fn a_seal_that_nobody_waits_for_freezes_no_guest() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.host.boots.send_replace(true);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    let control = Arc::new(TaskControl::default());
    control.cancel();
    let error = fixture
        .service
        .seal_machine("lab", SealRequest::default(), &Caller::daemon(), control)
        .await
        .unwrap_err();
    assert_eq!(problem(&error).kind, ProblemKind::Cancelled, "{error}");
    let control = Arc::new(TaskControl::default());
    *fixture.host.cancelled_by_freeze.lock().unwrap() = Some(control.clone());
    fixture
        .service
        .seal_machine("lab", SealRequest::default(), &Caller::daemon(), control)
        .await
        .unwrap_err();
    let freezes = fixture.host.freezes.lock().unwrap().clone();
    assert_eq!(freezes, ["write out", "write out", "freeze", "thaw"]);
}

#[tokio::test]
async fn a_guest_that_writes_out_for_long_is_waited_for_while_somebody_waits() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.host.boots.send_replace(true);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    fixture.host.execs_hang.store(true, Ordering::SeqCst);
    let seal = || {
        let (service, control) =
            (fixture.service.clone(), Arc::new(TaskControl::new(fixture.service.stopping_flag())));
        let work = Arc::clone(&control);
        let sealing = tokio::spawn(async move {
            service.seal_machine("lab", SealRequest::default(), &Caller::daemon(), work).await
        });
        (sealing, control)
    };
    // The client hangs up; the daemon is to end.
    for stops in [false, true] {
        let (sealing, control) = seal();
        fixture.host.exec_hangs.notified().await;
        if stops {
            fixture.service.begin_stop()
        } else {
            control.cancel()
        }
        let ended = tokio::time::timeout(Duration::from_secs(60), sealing).await.unwrap();
        assert_eq!(problem(&ended.unwrap().unwrap_err()).kind, ProblemKind::Cancelled);
    }
    assert_eq!(*fixture.host.freezes.lock().unwrap(), ["write out"; 2]);
}

#[tokio::test]
async fn a_note_that_is_too_long_freezes_no_guest() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.host.boots.send_replace(true);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    let seal = async |note_bytes| {
        let request = SealRequest { note: "x".repeat(note_bytes), ..SealRequest::default() };
        fixture.service.seal_machine("lab", request, &Caller::daemon(), Arc::default()).await
    };
    let refused = problem(&seal(1025).await.unwrap_err());
    let told = "the note has 1025 bytes, and at most 1024 are allowed";
    assert!(refused.kind == ProblemKind::Invalid && refused.to_string().contains(told), "{refused}");
    assert!(fixture.host.freezes.lock().unwrap().is_empty());
    seal(1024).await.unwrap();
}

#[tokio::test]
async fn a_kept_disk_is_sealed_while_its_machine_is_off_and_stays() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    fixture.stop().await;
    let sealed = fixture.seal_machine().await.unwrap();
    assert_eq!((sealed.version.number, sealed.pause), (2, None));
    let kept = fixture.kept().await;
    assert!(kept.len() == 1 && kept[0].purpose == Purpose::Persistent && kept[0].version == 1, "{kept:?}");
}

#[tokio::test]
async fn a_guest_that_restarts_while_its_disk_is_sealed_can_be_stopped() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let sealing = tokio::spawn({
        let service = fixture.service.clone();
        async move {
            service
                .seal_machine(
                    "lab",
                    SealRequest::default(),
                    &Caller::daemon(),
                    Arc::new(TaskControl::default()),
                )
                .await
        }
    });
    fixture.host.seal_waits.notified().await;
    fixture.vm().end(VmExit::Rebooted);
    until("it is off", async || fixture.record().await.state == MachineState::Stopped).await;
    let record = fixture.record().await;
    assert_eq!(record.wanted, Wanted::Running);
    assert!(record.reason.unwrap().contains("version of its disk"));
    let stop = async { fixture.service.stop("lab", true, &Caller::daemon()).await };
    tokio::time::timeout(Duration::from_secs(60), stop).await.unwrap().unwrap();
    fixture.host.seal_goes_on.notify_one();
    sealing.await.unwrap().unwrap();
    // Twice what a pause sleeps.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Stopped));
    assert_eq!((fixture.host.vms.lock().unwrap().len(), record.reason), (1, None));
}

#[tokio::test]
async fn a_removal_that_is_refused_ends_nothing_and_removes_nothing() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    fixture.host.seals_wait.store(true, Ordering::SeqCst);
    let sealing = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.seal_machine("lab", SealRequest::default(), &Caller::daemon(), Arc::default()).await }
    });
    fixture.host.seal_waits.notified().await;
    let is_refused = async || {
        let refused = fixture.service.remove("lab", true, &Caller::daemon()).await.unwrap_err();
        assert!(matches!(refused, LifecycleError::BeingSealed { .. }), "{refused}");
        assert_eq!(fixture.vm().0.borrow().clone(), None);
    };
    is_refused().await;
    // Also where the seal still has the machine's turn.
    let turn = fixture.service.lock(fixture.record().await.uuid).await;
    is_refused().await;
    drop(turn);
    assert_eq!(fixture.record().await.state, MachineState::Booting);
    fixture.host.seal_goes_on.notify_one();
    sealing.await.unwrap().unwrap();

    // An edit that is begun before the removal has its turn.
    fixture.stop().await;
    let machine = fixture.record().await.uuid;
    let turn = fixture.service.lock(machine).await;
    let edit = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.edit_image("image", "lab", &Caller::daemon()).await.map(drop) }
    });
    until("the edit waits", async || fixture.service.at_turn(machine) == 2).await;
    let removal = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.remove("lab", false, &Caller::daemon()).await }
    });
    until("the removal waits", async || fixture.service.at_turn(machine) == 3).await;
    drop(turn);
    edit.await.unwrap().unwrap();
    let refused = removal.await.unwrap().unwrap_err();
    assert!(matches!(refused, LifecycleError::Edits { .. }), "{refused}");
    assert!(fixture.dir.path().join("run/lab/console.log").exists());
}

#[tokio::test]
async fn a_removal_leaves_the_next_machine_of_that_name_alone() {
    let fixture = Fixture::persistent().await;
    let before = fixture.record().await;
    fixture.start().await.unwrap();
    fixture.stop().await;
    fixture.host.discards_wait.store(true, Ordering::SeqCst);
    let removing = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.remove("lab", false, &Caller::daemon()).await }
    });
    fixture.host.discard_waits.notified().await;
    let dir = fixture.dir.path().join("run/lab");
    assert!(!dir.exists());
    let new = crate::identity::make(&SystemRandom, "lab", None).unwrap();
    let record = MachineRecord { uuid: new.uuid, mac: new.mac, ..before };
    let mut repo = fixture.db.write().await.unwrap();
    repo.machines().add(&record).await.unwrap();
    repo.save().await.unwrap();
    fixture.start().await.unwrap();
    fixture.host.discard_goes_on.notify_one();
    removing.await.unwrap().unwrap();
    assert!(dir.join("seed.img").exists());
}

#[tokio::test]
async fn who_waits_for_a_machine_that_is_removed_leaves_the_next_one_of_its_name_alone() {
    let fixture = Fixture::new().await;
    let before = fixture.record().await;
    let turn = fixture.service.lock(before.uuid).await;
    let mut waiting = tokio::task::JoinSet::new();
    let service = || (fixture.service.clone(), Caller::daemon());
    let (of, caller) = service();
    waiting.spawn(async move { of.start("lab", &caller).await.map(drop) });
    for force in [false, true] {
        let (of, caller) = service();
        waiting.spawn(async move { of.stop("lab", force, &caller).await.map(drop) });
        let (of, caller) = service();
        waiting.spawn(async move { of.remove("lab", force, &caller).await });
    }
    let (of, caller) = service();
    waiting.spawn(async move { of.reset("lab", &caller).await.map(drop) });
    let (of, caller) = service();
    let limits = headwater_api::SetMachine { weight: Some(7), ..Default::default() };
    waiting.spawn(async move { of.set_limits("lab", limits, &caller).await.map(drop) });
    let (of, caller) = service();
    waiting.spawn(async move { of.edit_image("image", "lab", &caller).await.map(drop) });
    let (of, caller) = service();
    waiting.spawn(async move {
        of.seal_machine("lab", SealRequest::default(), &caller, Arc::default()).await.map(drop)
    });
    // Who waits has looked it up.
    let others = waiting.len();
    until("all wait", async || fixture.service.at_turn(before.uuid) == 1 + others).await;
    let new = crate::identity::make(&SystemRandom, "lab", None).unwrap();
    let (uuid, mac) = (new.uuid, new.mac);
    // One that runs, and so could be stopped.
    let next =
        MachineRecord { uuid, mac, wanted: Wanted::Running, state: MachineState::Running, ..before.clone() };
    let mut repo = fixture.db.write().await.unwrap();
    repo.machines().remove(before.uuid).await.unwrap();
    repo.machines().add(&next).await.unwrap();
    repo.save().await.unwrap();
    drop(turn);
    while let Some(outcome) = waiting.join_next().await {
        let outcome = outcome.unwrap();
        assert!(matches!(outcome, Err(LifecycleError::Unknown(_))), "{outcome:?}");
    }
    assert_eq!(fixture.record().await, next);
    assert_eq!((fixture.kept().await, fixture.host.vms.lock().unwrap().len()), (Vec::new(), 0));
}

#[tokio::test]
async fn the_disk_of_an_edit_gets_more_room_whatever_the_mode_of_its_machine() {
    let fixture = Fixture::with_cache(|cache| (cache.mode, cache.disk_bytes) = (CacheMode::Ram, 0)).await;
    let api = Api::serve(&fixture).await;
    let (status, answer) = api.ask("PATCH", "machines/lab", r#"{"disk_bytes":1073741824}"#).await;
    assert!(status == 400 && answer.contains("no limit for disk"), "{answer}");
    fixture.edit().await;
    fixture.start().await.unwrap();
    let (status, answer) = api.ask("PATCH", "machines/lab", r#"{"disk_bytes":1073741824}"#).await;
    assert_eq!(status, 200, "{answer}");
    // What it does not say stays as the edit had it, too.
    assert_eq!(api.ask("PATCH", "machines/lab", r#"{"weight":200}"#).await.0, 200);
    let given = fixture.host.limits.lock().unwrap().clone();
    let given: Vec<_> = given.iter().map(|cache| (cache.mode, cache.disk_bytes)).collect();
    assert_eq!(given, [(CacheMode::RamDisk, 1 << 30); 2]);
    assert_eq!(fixture.record().await.cache.mode, CacheMode::Ram);
}

#[tokio::test]
async fn an_edit_that_took_the_place_of_the_one_that_was_meant_stays() {
    let fixture = Fixture::new().await;
    let edit = fixture.edit().await;
    let turn = fixture.service.lock(edit.machine).await;
    let (discard, seal) = (
        tokio::spawn({
            let service = fixture.service.clone();
            async move { service.discard_session("image", &Caller::daemon()).await.map(drop) }
        }),
        tokio::spawn({
            let service = fixture.service.clone();
            let control = Arc::new(TaskControl::default());
            async move {
                service
                    .seal_session("image", SealRequest::default(), &Caller::daemon(), control)
                    .await
                    .map(drop)
            }
        }),
    );
    // Who waits has looked it up.
    until("both wait", async || fixture.service.at_turn(edit.machine) == 3).await;
    fixture.service.forget_persistent(&edit, None).await.unwrap();
    let other = PersistentDisk { id: Uuid::from_u128(7), ..edit };
    let mut repo = fixture.db.write().await.unwrap();
    repo.persistent_disks().add(&other).await.unwrap();
    repo.save().await.unwrap();
    drop(turn);
    for outcome in [discard.await.unwrap(), seal.await.unwrap()] {
        assert!(matches!(outcome, Err(LifecycleError::NoEdit { .. })), "{outcome:?}");
    }
    assert_eq!(fixture.kept().await, [other]);
    assert_eq!(fixture.host.seals.lock().unwrap().len(), 0);
}
