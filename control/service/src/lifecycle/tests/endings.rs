//! Machines and daemons that end in the middle of something.

use headwater_api::SetMachine;

use super::removals::Api;
use super::*;
use crate::answer::problem;

#[tokio::test]
async fn a_stop_that_is_broken_into_says_when_and_does_its_work_once() {
    let fixture = Fixture::new().await;
    fixture.host.deaf.store(true, Ordering::SeqCst);
    fixture.start().await.unwrap();
    let stopping = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop_all(false).await }
    });
    fixture.host.button_pressed.notified().await;
    let hurrying = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop_all(true).await }
    });
    stopping.await.unwrap();
    hurrying.await.unwrap();
    let reason = fixture.record().await.reason.unwrap();
    assert!(reason.starts_with("it was killed") && reason.contains("after it was asked"), "{reason}");
    let events = fixture.events().await;
    assert_eq!(events.iter().filter(|event| event.action == "stop").count(), 1, "{events:?}");
}

#[tokio::test]
async fn a_start_that_could_not_be_noted_is_noted_later() {
    let fixture = Fixture::new().await;
    fixture.db.fails.store(true, Ordering::SeqCst);
    let error = problem(&fixture.start().await.unwrap_err()).to_string();
    assert!(error.starts_with("cannot start machine 'lab': the database"), "{error}");
    fixture.db.fails.store(false, Ordering::SeqCst);

    let reconciling = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.keep_reconciling().await }
    });
    fixture.host.starts_wait.store(true, Ordering::SeqCst);
    let starting = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.start("lab", &Caller::daemon()).await }
    });
    fixture.host.start_waits.notified().await;
    fixture.db.fails.store(true, Ordering::SeqCst);
    fixture.host.go_on.notify_one();
    let error = problem(&starting.await.unwrap().unwrap_err()).to_string();
    assert!(error.starts_with("machine 'lab' is on, but"), "{error}");
    fixture.db.fails.store(false, Ordering::SeqCst);
    until("it boots", async || fixture.record().await.state == MachineState::Booting).await;

    fixture.db.fails.store(true, Ordering::SeqCst);
    fixture.host.boots.send_replace(true);
    let active = fixture.service.active_map().values().next().unwrap().clone();
    until("it has booted", async || active.boot_time().is_some()).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    fixture.db.fails.store(false, Ordering::SeqCst);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    assert!(fixture.record().await.boot_ms.is_some());
    reconciling.abort();
}

#[tokio::test]
async fn a_guest_that_restarts_while_nothing_can_be_noted_is_started_again() {
    let fixture = Fixture::new().await;
    let reconciling = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.keep_reconciling().await }
    });
    for (count, fails) in [(1, &fixture.db.full), (2, &fixture.db.fails)] {
        fixture.start().await.unwrap();
        fails.store(true, Ordering::SeqCst);
        fixture.vm().end(VmExit::Rebooted);
        until("its disk is closed", async || fixture.open_disks() == 0).await;
        // It is tried again, and looked whether the machine is lost.
        tokio::time::sleep(Duration::from_millis(2 * crate::lifecycle::TICK_MS)).await;
        fails.store(false, Ordering::SeqCst);
        until("it is on again or lost", async || {
            fixture.host.vms.lock().unwrap().len() > count
                || fixture.record().await.state == MachineState::Lost
        })
        .await;
        until("it boots", async || fixture.record().await.state == MachineState::Booting).await;
        assert_eq!((fixture.host.vms.lock().unwrap().len(), fixture.open_disks()), (count + 1, 1));
        let restarts = fixture.events().await;
        let restarts = restarts.iter().filter(|event| event.detail.starts_with("the guest restarted"));
        assert_eq!(restarts.count(), count);
    }
    // One that is stopped meanwhile is off, and not lost.
    fixture.db.full.store(true, Ordering::SeqCst);
    fixture.vm().end(VmExit::Rebooted);
    until("its disk is closed", async || fixture.open_disks() == 0).await;
    fixture.db.full.store(false, Ordering::SeqCst);
    fixture.service.stop("lab", false, &Caller::daemon()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2 * crate::lifecycle::TICK_MS)).await;
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted, record.reason), (MachineState::Stopped, Wanted::Stopped, None));
    reconciling.abort();
}

#[tokio::test]
async fn a_machine_that_is_not_started_again_says_so() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.vm().end(VmExit::Rebooted);
    until("it has started again", async || fixture.host.vms.lock().unwrap().len() == 2).await;
    let again = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    // Longer than it takes until the end of the daemon has begun.
    let waiting = fixture.restarts_until_a_pause_of(4).await;
    fixture.service.begin_stop();
    fixture.service.stop_all(false).await;
    let told = crate::lifecycle::restart::DAEMON_ENDED;
    assert_eq!(fixture.record().await.reason.as_deref(), Some(told));
    // An earlier daemon died in the pause.
    again.save(&waiting, &Caller::daemon(), "state", "").await.unwrap();
    let events = fixture.events().await.len();
    for _ in 0..2 {
        again.recover().await.unwrap();
        let record = fixture.record().await;
        assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Running));
        assert_eq!((record.reason.as_deref(), fixture.events().await.len()), (Some(told), events + 1));
    }
    again.start("lab", &Caller::daemon()).await.unwrap();
}

#[tokio::test]
async fn a_machine_that_a_reset_could_not_start_again_is_not_said_to_be_about_to_start() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let stopped = (MachineState::Stopped, "was interrupted; start it");
    let lost = (MachineState::Lost, "could not be recorded");
    // It is noted that it is reset, and that it is off; or only the first.
    for (room, noted, (found, told)) in
        [(2, MachineState::Stopped, stopped), (1, MachineState::Booting, lost)]
    {
        let starts = fixture.host.vms.lock().unwrap().len();
        *fixture.db.room.lock().unwrap() = Some(room);
        let error = problem(&fixture.service.reset("lab", &Caller::daemon()).await.unwrap_err());
        assert_eq!(error.kind, ProblemKind::NoSpace);
        let error = error.to_string();
        for says in ["machine 'lab' is off", "free space on", "machine start lab", "machine reset lab"] {
            assert!(error.contains(says), "{says}: {error}");
        }
        let record = fixture.record().await;
        assert_eq!((record.state, record.wanted, record.reason), (noted, Wanted::Running, None));
        *fixture.db.room.lock().unwrap() = None;
        let reconciling = tokio::spawn({
            let service = fixture.service.clone();
            async move { service.keep_reconciling().await }
        });
        until("it is said", async || fixture.record().await.reason.is_some()).await;
        reconciling.abort();
        let record = fixture.record().await;
        assert_eq!((record.state, fixture.host.vms.lock().unwrap().len()), (found, starts));
        let reason = record.reason.unwrap();
        assert!(reason.contains(told), "{reason}");
        fixture.start().await.unwrap();
        assert_eq!((fixture.record().await.state, fixture.open_disks()), (MachineState::Booting, 1));
    }
}

#[tokio::test]
async fn a_machine_that_somebody_ended_is_not_said_to_have_been_about_to_start() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.vm().end(VmExit::Killed);
    until("it is off", async || fixture.record().await.state == MachineState::Stopped).await;
    assert_eq!(fixture.record().await.wanted, Wanted::Running);
    let reconciling = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.keep_reconciling().await }
    });
    until("it is not wanted any more", async || fixture.record().await.wanted == Wanted::Stopped).await;
    reconciling.abort();
    assert_eq!(fixture.record().await.reason.as_deref(), Some("it was ended"));
}

#[tokio::test]
async fn a_machine_that_the_end_of_the_daemon_killed_stays_wanted() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.service.begin_stop();
    // Whoever watches it is there first.
    fixture.vm().kill().await.unwrap();
    until("it is off", async || fixture.record().await.state == MachineState::Stopped).await;
    fixture.service.stop_all(true).await;
    fixture.service.stop_all(false).await;
    let record = fixture.record().await;
    let told = format!("it was ended; {}", crate::lifecycle::restart::DAEMON_ENDED);
    assert_eq!((record.wanted, record.reason), (Wanted::Running, Some(told)));
}

#[tokio::test]
async fn a_machine_stops_also_where_that_cannot_be_noted() {
    let fixture = Fixture::new().await;
    let stops = || std::mem::take(&mut *fixture.host.stops.lock().unwrap());
    for (force, how) in [(true, "at once"), (false, "ACPI")] {
        fixture.start().await.unwrap();
        fixture.db.full.store(true, Ordering::SeqCst);
        let error = fixture.service.stop("lab", force, &Caller::daemon()).await.unwrap_err();
        assert!(error.to_string().starts_with("machine 'lab' is off, but"), "{error}");
        assert_eq!((stops(), fixture.open_disks()), (vec![how], 0));
        fixture.db.full.store(false, Ordering::SeqCst);
        assert_eq!(fixture.record().await.state, MachineState::Booting);
    }
    // Also in somebody else's turn.
    fixture.start().await.unwrap();
    fixture.host.deaf.store(true, Ordering::SeqCst);
    let stopping = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop("lab", false, &Caller::daemon()).await }
    });
    fixture.host.button_pressed.notified().await;
    fixture.db.full.store(true, Ordering::SeqCst);
    fixture.service.stop("lab", true, &Caller::daemon()).await.unwrap();
    assert!(matches!(stopping.await.unwrap(), Err(LifecycleError::OffNotNoted { .. })));
    assert_eq!((fixture.vm().0.borrow().clone(), fixture.open_disks()), (Some(VmExit::Killed), 0));
}

#[tokio::test]
async fn what_a_stop_gives_back_is_room_to_note_it() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.db.full.store(true, Ordering::SeqCst);
    fixture.host.deaf.store(true, Ordering::SeqCst);
    let mut stopping = tokio::spawn({
        let service = fixture.service.clone();
        async move { service.stop("lab", false, &Caller::admin("uid 7")).await }
    });
    tokio::select! {
        () = fixture.host.button_pressed.notified() => {}
        stopped = &mut stopping => panic!("its guest was not asked: {stopped:?}"),
    }
    fixture.db.full.store(false, Ordering::SeqCst);
    fixture.vm().end(VmExit::PoweredOff);
    let record = stopping.await.unwrap().unwrap();
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Stopped));
    let events = fixture.events().await;
    assert!(events.iter().any(|event| event.action == "stop" && event.caller == "uid 7"), "{events:?}");
}

#[tokio::test]
async fn the_end_of_the_daemon_asks_guests_to_end_whatever_the_database_does() {
    let fixture = Fixture::new().await;
    for fails in [&fixture.db.full, &fixture.db.fails] {
        fixture.start().await.unwrap();
        fixture.host.stops.lock().unwrap().clear();
        fails.store(true, Ordering::SeqCst);
        fixture.service.stop_all(false).await;
        fails.store(false, Ordering::SeqCst);
        assert_eq!((fixture.host.stops.lock().unwrap().clone(), fixture.open_disks()), (vec!["ACPI"], 0));
        assert_eq!(fixture.vm().0.borrow().clone(), Some(VmExit::PoweredOff));
    }
}

#[tokio::test]
async fn a_full_disk_of_the_database_is_said_to_be_full() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.db.full.store(true, Ordering::SeqCst);
    let full = ProblemKind::NoSpace.http_status();
    for (method, path, body, tried) in [
        ("PATCH", "machines/lab", r#"{"weight":200}"#, ""),
        ("POST", "machines/lab/start", "", ""),
        ("POST", "machines", r#"{"name":"desk","image":"image"}"#, "cannot create machine 'desk'"),
        ("POST", "catalogs", r#"{"name":"ward","image":"image"}"#, "cannot create catalog 'ward'"),
    ] {
        let (status, answer) = api.ask(method, path, body).await;
        assert!(status == full && answer.contains("free space on"), "{method} {path}: {answer}");
        assert!(answer.contains(tried), "{method} {path}: {answer}");
    }
}

#[tokio::test]
async fn limits_that_could_not_be_noted_are_kept_and_noted_with_the_next() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let caller = Caller::daemon();
    let set = async |ram_bytes, disk_bytes, weight| {
        let limits = SetMachine { ram_bytes, disk_bytes, weight, ..SetMachine::default() };
        fixture.service.set_limits("lab", limits, &caller).await
    };
    let in_use = || *fixture.host.limits.lock().unwrap().last().unwrap();
    let limits = |cache: CacheSettings| (cache.ram_bytes, cache.disk_bytes, cache.weight);
    let before = fixture.record().await.cache;
    fixture.db.full.store(true, Ordering::SeqCst);
    // They count all the same: of a machine that stands still they may be what lets it go on.
    for (ram_bytes, weight) in [(Some(1 << 30), None), (None, Some(300))] {
        let error = set(ram_bytes, None, weight).await.unwrap_err();
        assert!(matches!(error, LifecycleError::LimitsNotNoted { .. }), "{error}");
        assert_eq!(problem(&error).kind, ProblemKind::NoSpace);
        assert_eq!(in_use().ram_bytes, 1 << 30);
    }
    assert_eq!((limits(in_use()), fixture.record().await.cache), ((1 << 30, before.disk_bytes, 300), before));
    fixture.db.full.store(false, Ordering::SeqCst);
    let all = (1 << 30, 5 << 30, 300);
    assert_eq!(limits(set(None, Some(5 << 30), None).await.unwrap().cache), all);
    assert_eq!((limits(in_use()), limits(fixture.record().await.cache)), (all, all));
    let events = fixture.events().await;
    let noted: Vec<_> = events.iter().filter(|event| event.action == "set").collect();
    let [noted] = noted[..] else { panic!("{noted:?}") };
    for what in ["RAM", "disk", "weight 100 -> 300"] {
        assert!(noted.detail.contains(what), "{noted:?}");
    }
    // Those that were never noted end with the machine's run.
    fixture.db.full.store(true, Ordering::SeqCst);
    set(None, None, Some(7)).await.unwrap_err();
    fixture.db.full.store(false, Ordering::SeqCst);
    fixture.service.stop("lab", true, &caller).await.unwrap();
    fixture.start().await.unwrap();
    assert_eq!(limits(set(None, Some(6 << 30), None).await.unwrap().cache), (1 << 30, 6 << 30, 300));
}

#[tokio::test]
async fn an_alarm_that_cannot_be_noted_is_noted_later() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    let active = fixture.service.active_map().values().next().unwrap().clone();
    // The history cannot be written, then nothing can be read either.
    for fails in [&fixture.db.full, &fixture.db.fails] {
        fails.store(true, Ordering::SeqCst);
        fixture.host.disks_full.store(true, Ordering::SeqCst);
        let reconciling = tokio::spawn({
            let service = fixture.service.clone();
            async move { service.keep_reconciling().await }
        });
        until("there is an alarm", async || active.alarm().is_some()).await;
        assert!(fixture.host.relieved.swap(false, Ordering::SeqCst));
        fails.store(false, Ordering::SeqCst);
        let noted =
            async |action: &str| fixture.events().await.iter().filter(|event| event.action == action).count();
        let before = noted("alarm over").await;
        until("it is noted", async || noted("alarm").await > before).await;
        fixture.host.disks_full.store(false, Ordering::SeqCst);
        until("its end is noted", async || noted("alarm over").await > before).await;
        assert_eq!((noted("alarm").await, noted("alarm over").await), (before + 1, before + 1));
        reconciling.abort();
    }
}

#[tokio::test]
async fn the_end_of_the_daemon_waits_for_a_promotion_and_begins_none() {
    let fixture = Fixture::new().await;
    fixture.host.promotions_wait.store(true, Ordering::SeqCst);
    let reconcile = || {
        let service = fixture.service.clone();
        tokio::spawn(async move { service.keep_reconciling().await })
    };
    let reconciling = reconcile();
    fixture.host.promotion_waits.notified().await;
    fixture.service.begin_stop();
    reconciling.abort();
    assert!(!fixture.service.operations_ended(Duration::ZERO).await, "it is not waited for");
    fixture.host.promotion_goes_on.notify_one();
    assert!(fixture.service.operations_ended(Duration::from_secs(60)).await);
    let events = fixture.events().await;
    assert!(events.iter().any(|event| event.action == "promoted"), "{events:?}");
    let reconciling = reconcile();
    let another = tokio::time::timeout(
        Duration::from_millis(2 * crate::lifecycle::TICK_MS),
        fixture.host.promotion_waits.notified(),
    );
    assert!(another.await.is_err(), "another one was begun");
    reconciling.abort();
}

#[tokio::test]
async fn a_clock_that_is_set_while_a_guest_boots_is_no_part_of_its_boot() {
    const HOUR_MS: i64 = 3_600_000;
    let fixture = Fixture::new().await;
    for set in [HOUR_MS, -HOUR_MS] {
        fixture.start().await.unwrap();
        let took = Duration::from_millis(20);
        tokio::time::sleep(took).await;
        fixture.host.clock_set_ms.fetch_add(set, Ordering::SeqCst);
        fixture.host.boots.send_replace(true);
        until("it runs", async || fixture.record().await.state == MachineState::Running).await;
        let boot_ms = i64::try_from(fixture.record().await.boot_ms.unwrap()).unwrap();
        assert!(u128::try_from(boot_ms).unwrap() >= took.as_millis() && boot_ms < HOUR_MS, "{boot_ms}");
        fixture.service.stop("lab", true, &Caller::daemon()).await.unwrap();
        fixture.host.boots.send_replace(false);
    }
}

#[tokio::test]
async fn a_machine_that_is_reset_while_its_guest_restarts_goes_on() {
    let fixture = Fixture::persistent().await;
    fixture.start().await.unwrap();
    let starts = || fixture.host.vms.lock().unwrap().len();
    fixture.vm().end(VmExit::Rebooted);
    until("it has started again", async || starts() == 2).await;
    // Longer than a reset takes.
    fixture.restarts_until_a_pause_of(4).await;
    let paused = starts();
    let record = fixture.service.reset("lab", &Caller::daemon()).await.unwrap();
    assert_eq!((record.state, record.wanted), (MachineState::Booting, Wanted::Running));
    // Its pause may be over by now, and then it was on already.
    assert!(starts() > paused && fixture.host.discarded.lock().unwrap().len() == 1);

    // One that cannot be started stays as it is while that is so.
    *fixture.host.unreadable.lock().unwrap() = Some("image@1".to_owned());
    fixture.vm().end(VmExit::Rebooted);
    until("it is said why", async || fixture.record().await.reason.is_some()).await;
    *fixture.host.unreadable.lock().unwrap() = Some("image".to_owned());
    fixture.service.reset("lab", &Caller::daemon()).await.unwrap_err();
    assert_eq!(fixture.record().await.wanted, Wanted::Running);
}

#[tokio::test]
async fn a_machine_whose_restart_fails_has_an_alarm_until_it_is_on_or_stopped() {
    let fixture = Fixture::new().await;
    let alarm = async || fixture.service.alarm_of(&fixture.record().await);
    for stopped in [false, true] {
        fixture.start().await.unwrap();
        fixture.host.start_fails.store(true, Ordering::SeqCst);
        fixture.vm().end(VmExit::Rebooted);
        until("it has an alarm", async || alarm().await.is_some()).await;
        let shown = alarm().await.unwrap();
        assert!(
            shown.message.contains("its restart failed") && shown.message.contains("not in this test"),
            "{shown}"
        );
        assert_eq!(fixture.view().await.alarm, Some(shown));
        if stopped {
            fixture.service.stop("lab", false, &Caller::daemon()).await.unwrap();
            assert_eq!(alarm().await, None);
        }
        fixture.host.start_fails.store(false, Ordering::SeqCst);
        if !stopped {
            until("it is on again", async || fixture.record().await.state == MachineState::Booting).await;
            assert_eq!(alarm().await, None);
            fixture.stop().await;
        }
    }
}

#[tokio::test]
async fn what_is_done_while_the_history_cannot_be_written_is_no_failure_and_is_noted_later() {
    let fixture = Fixture::new().await;
    fixture.next_version();
    fixture.next_version();
    fixture.start().await.unwrap();
    fixture.host.boots.send_replace(true);
    until("it runs", async || fixture.record().await.state == MachineState::Running).await;
    let api = Api::serve(&fixture).await;
    fixture.db.full.store(true, Ordering::SeqCst);
    for (method, path, body) in [
        ("POST", "images/image/revert", r#"{"channel":"test"}"#),
        ("DELETE", "images/image@2", ""),
        ("POST", "images/image@1/trace/merge", r#"{"source":"/trace"}"#),
        ("POST", "images/image@1/note", r#"{"note":"the first"}"#),
    ] {
        let (status, answer) = api.ask(method, path, body).await;
        assert_eq!(status, 200, "{method} {path}: {answer}");
    }
    // What makes room: the fake guest's answer, and limits that the disk has at once.
    let (_, answer) = api.ask("POST", "machines/lab/exec", r#"{"argv":["rm","-r","/var/tmp"]}"#).await;
    assert!(answer.contains("not in this test"), "{answer}");
    let (status, answer) = api.ask("PATCH", "machines/lab", r#"{"ram_bytes":900000000}"#).await;
    assert_eq!(status, ProblemKind::NoSpace.http_status(), "{answer}");
    assert!(answer.contains("has the new limits") && answer.contains("free space on"), "{answer}");
    assert_eq!(fixture.host.limits.lock().unwrap().last().unwrap().ram_bytes, 900_000_000);
    let noted = async || fixture.events().await.iter().map(|event| event.action.clone()).collect::<Vec<_>>();
    let before = noted().await.len();
    assert!(fixture.service.write_pending_events().await.is_err());
    fixture.db.full.store(false, Ordering::SeqCst);
    assert!(fixture.service.notes_written(Duration::from_secs(60)).await);
    let mut after = noted().await;
    // The newest comes first.
    after.truncate(after.len() - before);
    after.reverse();
    assert_eq!(after, ["reverted", "removed", "boot trace merged", "note changed", "exec"]);
}

#[tokio::test]
async fn a_disk_that_is_closed_without_its_last_writes_is_no_orderly_stop() {
    const LOST: &str = "the machine's last writes are lost";
    let fixture = Fixture::persistent().await;
    let lost = async || fixture.events().await.iter().filter(|it| it.action == "not saved").count();
    fixture.host.closes_fail.store(true, Ordering::SeqCst);
    // Stopped; switched off; killed; crashed.
    let ends = [VmExit::PoweredOff, VmExit::Killed, VmExit::Crashed { reason: "it fell over".to_owned() }];
    for (count, exit) in [None].into_iter().chain(ends.map(Some)).enumerate() {
        fixture.start().await.unwrap();
        assert_eq!(fixture.record().await.reason, None);
        match exit {
            Some(exit) => {
                fixture.vm().end(exit);
                until("it is off", async || !fixture.record().await.state.is_active()).await;
            }
            None => fixture.stop().await,
        }
        let reason = fixture.record().await.reason;
        assert!(reason.as_ref().is_some_and(|reason| reason.contains(LOST)), "{reason:?}");
        assert_eq!(lost().await, count + 1);
    }
    // What is given up is no loss.
    fixture.start().await.unwrap();
    fixture.service.reset("lab", &Caller::daemon()).await.unwrap();
    assert_eq!((lost().await, fixture.record().await.reason), (4, None));
    fixture.host.closes_fail.store(false, Ordering::SeqCst);
    fixture.stop().await;
    assert_eq!((lost().await, fixture.record().await.reason), (4, None));
}

#[tokio::test]
async fn a_guest_is_asked_to_end_though_the_database_takes_its_time() {
    let fixture = Fixture::new().await;
    fixture.start().await.unwrap();
    fixture.db.writes_wait.store(true, Ordering::SeqCst);
    let service = fixture.service.clone();
    let stopping = tokio::spawn(async move { service.stop("lab", false, &Caller::daemon()).await });
    until("its power button is pressed", async || *fixture.host.stops.lock().unwrap() == ["ACPI"]).await;
    fixture.db.writes_wait.store(false, Ordering::SeqCst);
    fixture.db.write_goes_on.notify_one();
    stopping.await.unwrap().unwrap();
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Stopped));
    assert!(fixture.events().await.iter().any(|event| event.action == "stop"));
}

#[tokio::test]
async fn what_was_on_when_the_daemon_stopped_is_wanted_and_starts_again_when_asked_for() {
    let fixture = Fixture::new().await;
    fixture.second_machine().await;
    fixture.start().await.unwrap();
    fixture.service.begin_stop();
    fixture.service.stop_all(false).await;
    let told = Some(crate::lifecycle::restart::DAEMON_ENDED.to_owned());
    let next = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    next.recover().await.unwrap();
    // Nobody takes it for one that was to be started and was forgotten.
    let reconciling = tokio::spawn({
        let service = next.clone();
        async move { service.keep_reconciling().await }
    });
    tokio::time::sleep(Duration::from_millis(2500)).await;
    reconciling.abort();
    let record = fixture.record().await;
    assert_eq!((record.state, record.wanted, record.reason), (MachineState::Stopped, Wanted::Running, told));
    assert_eq!(fixture.host.vms.lock().unwrap().len(), 1);
    // The store is away at first.
    *fixture.host.unreadable.lock().unwrap() = Some("image".to_owned());
    next.resume().await;
    until("it is said why", async || {
        let reason = fixture.record().await.reason.unwrap_or_default();
        reason.starts_with("it was on when the daemon ended, and its start is retried until it succeeds")
    })
    .await;
    *fixture.host.unreadable.lock().unwrap() = None;
    until("it is on", async || fixture.record().await.state == MachineState::Booting).await;
    // The other one was off, and stays so.
    assert_eq!(fixture.host.vms.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn what_a_crash_of_the_daemon_left_lost_is_resumed_and_what_was_being_stopped_is_not() {
    for (wanted, starts) in [(Wanted::Running, 1), (Wanted::Stopped, 0)] {
        let fixture = Fixture::new().await;
        let record = MachineRecord { wanted, state: MachineState::Running, ..fixture.record().await };
        fixture.service.save(&record, &Caller::daemon(), "state", "").await.unwrap();
        fixture.service.recover().await.unwrap();
        assert_eq!(fixture.record().await.state, MachineState::Lost);
        fixture.service.resume().await;
        until("it is on", async || fixture.host.vms.lock().unwrap().len() == starts).await;
        let state = if starts == 1 { MachineState::Booting } else { MachineState::Lost };
        until("it is noted", async || fixture.record().await.state == state).await;
    }
}

#[tokio::test]
async fn what_was_kept_with_a_disk_that_is_gone_is_swept() {
    let fixture = Fixture::new().await;
    let disk = headwater_db::PersistentDisk {
        id: Uuid::from_u128(5),
        machine: fixture.record().await.uuid,
        purpose: headwater_db::Purpose::Persistent,
        image: "image".to_owned(),
        version: 1,
        hash: "hash".to_owned(),
        author: "anna".to_owned(),
        created_at_ms: 0,
        is_begun: true,
    };
    let mut repo = fixture.db.write().await.unwrap();
    repo.persistent_disks().add(&disk).await.unwrap();
    repo.save().await.unwrap();
    // As a daemon leaves them that dies after it has removed a machine from the database, and before it removes the files.
    let gone = headwater_db::PersistentDisk { id: Uuid::from_u128(6), ..disk.clone() };
    let files = |machine: &str, disk: &headwater_db::PersistentDisk| {
        let tpm = fixture.service.kept_tpm(machine, disk);
        std::fs::create_dir_all(&tpm).unwrap();
        std::fs::write(tpm.join("tpm2-00.permall"), "keys").unwrap();
        std::fs::write(fixture.service.kept_variables(machine, disk), "variables").unwrap();
        [tpm, fixture.service.kept_variables(machine, disk)]
    };
    let (kept, swept) = (files("lab", &disk), [files("lab", &gone), files("removed", &gone)].concat());
    fixture.service.recover().await.unwrap();
    assert_eq!((kept.map(|path| path.exists()), swept.iter().any(|path| path.exists())), ([true; 2], false));
    assert!(!fixture.service.run_dir("removed").exists());
}
