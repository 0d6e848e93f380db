//! Machines that go to another host: by a drain, or because their host is lost.

use super::*;
use crate::tasks::begin_drain;

impl Pair {
    /// Notes that a machine is another host's, as a drain or the loss of its host does.
    async fn give(&self, machine: Uuid, host: Uuid) {
        let mut repo = self.controller.db.write().await.unwrap();
        let mut record = repo.machines().by_uuid(machine).await.unwrap().unwrap();
        record.host = host;
        (record.wanted, record.state) = (Wanted::Stopped, MachineState::Stopped);
        assert!(repo.machines().set_host(&record).await.unwrap());
        repo.save().await.unwrap();
    }

    /// Moves a machine while `what` waits for the turn of that machine.
    async fn move_before(&self, machine: Uuid, host: Uuid, what: impl Future<Output = ()> + Send + 'static) {
        let service = &self.controller.service;
        let turn = service.lock(machine).await;
        let waiting = tokio::spawn(what);
        until("the call waits for the turn", async || service.at_turn(machine) == 2).await;
        self.give(machine, host).await;
        drop(turn);
        waiting.await.unwrap();
    }
}

#[tokio::test]
async fn a_call_that_waits_while_its_machine_moves_goes_to_the_new_host() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let (own, there) = (own_host().id, Uuid::from_u128(2));
    let service = pair.controller.service.clone();
    let is_on = |fixture: &Fixture, machine: &MachineRecord| fixture.service.active(machine.uuid).is_some();
    let start = |name: &'static str| {
        let service = service.clone();
        async move { service.start(name, &Caller::daemon()).await.map(drop).unwrap() }
    };

    // From the node to the controller's own host. The node has a copy until the move removes that.
    let far = pair.create("far").await.unwrap();
    pair.move_before(far.uuid, own, start("far")).await;
    assert_eq!((is_on(&pair.controller, &far), is_on(&pair.node, &far)), (true, false));
    // And back.
    service.stop("far", true, &Caller::daemon()).await.unwrap();
    pair.move_before(far.uuid, there, start("far")).await;
    assert_eq!((is_on(&pair.controller, &far), is_on(&pair.node, &far)), (false, true));

    let near = pair.controller.record().await;
    let link = service.link(there).unwrap();
    let refused = service.assign(&link, &near).await.unwrap_err();
    assert!(refused.to_string().contains("was moved from host 'b'"), "{refused}");
    assert!(pair.node.service.record_of(near.uuid, "lab").await.is_err());
    // A removal that waits is done on the host that the machine is of by then.
    let gone = pair.create("gone").await.unwrap();
    let remove = {
        let service = service.clone();
        async move { service.remove("gone", false, &Caller::daemon()).await.unwrap() }
    };
    pair.give(gone.uuid, own).await;
    pair.move_before(gone.uuid, there, remove).await;
    assert!(pair.node.service.record_of(gone.uuid, "gone").await.is_err());
    assert!(service.record_of(gone.uuid, "gone").await.is_err());
}

/// Waits until no task goes on, and gives the outcome of the newest.
async fn outcome_of_task(pair: &Pair) -> String {
    let tasks = async || pair.controller.db.read().await.unwrap().tasks().unended().await.unwrap();
    until("the task has ended", async || tasks().await.is_empty()).await;
    let newest = pair.controller.db.read().await.unwrap().tasks().older(i64::MAX, 1).await.unwrap();
    newest[0].outcome.clone().unwrap()
}

#[tokio::test]
async fn a_drain_forgets_no_machine_that_was_on() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("b", 1).await.remove(0);
    until("a machine starts", async || service.start(&machine.name, &Caller::daemon()).await.is_ok()).await;

    // The connection breaks while the guest is being stopped.
    pair.node.host.deaf.store(true, Ordering::SeqCst);
    pair.controller.host.start_fails.store(true, Ordering::SeqCst);
    let begun = begin_drain(&service, Caller::admin("anna"), "b".to_owned()).await;
    begun.map_err(|failure| failure.0).unwrap();
    pair.node.host.button_pressed.notified().await;
    connection.abort();
    until("the node is away", async || service.fleet().connecting().is_empty()).await;
    pair.node.vm().end(VmExit::PoweredOff);
    let _connection = pair.connect().await;
    let outcome = outcome_of_task(&pair).await;
    assert!(outcome.contains(r#""moved":[{"machine":"class-1""#), "{outcome}");
    assert!(pair.node.service.own_machines().await.unwrap().is_empty());

    // Its first start failed, and it is started again.
    let record = service.record("class-1").await.unwrap();
    assert_eq!((record.host, record.to_start), (own_host().id, true));
    assert!(service.active(machine.uuid).is_none());
    pair.controller.host.start_fails.store(false, Ordering::SeqCst);
    until("it is on again", async || {
        service.look_after_lost_hosts().await.unwrap();
        service.active(machine.uuid).is_some()
    })
    .await;
    until("nothing is left to start", async || !service.record("class-1").await.unwrap().to_start).await;
}

#[tokio::test]
async fn a_stop_between_two_attempts_of_a_move_is_kept() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("b", 1).await.remove(0);
    until("a machine starts", async || service.start(&machine.name, &Caller::daemon()).await.is_ok()).await;
    pair.node.host.deaf.store(true, Ordering::SeqCst);
    let begun = begin_drain(&service, Caller::admin("anna"), "b".to_owned()).await;
    begun.map_err(|failure| failure.0).unwrap();
    pair.node.host.button_pressed.notified().await;
    assert!(service.record("class-1").await.unwrap().to_start);
    connection.abort();
    until("the node is away", async || service.fleet().connecting().is_empty()).await;
    // Its host is away, and that is said. The machine stays off all the same.
    assert!(service.stop("class-1", false, &Caller::admin("bert")).await.is_err());
    pair.node.vm().end(VmExit::PoweredOff);
    let _connection = pair.connect().await;
    let outcome = outcome_of_task(&pair).await;
    assert!(outcome.contains(r#""moved":[{"machine":"class-1""#), "{outcome}");
    let record = service.record("class-1").await.unwrap();
    assert_eq!((record.host, record.is_to_be_on()), (own_host().id, false));
    assert!(service.active(machine.uuid).is_none());
}

#[tokio::test]
async fn a_reset_of_a_machine_that_is_off_ends_its_start() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let far = pair.class_on("b", 1).await.remove(0);
    let near = pair.controller.record().await;
    for machine in [&far, &near] {
        service.is_to_start(machine.uuid).await.unwrap();
        service.reset(&machine.name, &Caller::daemon()).await.unwrap();
        assert!(!service.record(&machine.name).await.unwrap().is_to_be_on(), "{}", machine.name);
    }
}

#[tokio::test]
async fn a_machine_stays_on_if_its_new_host_cannot_run_it() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("own", 1).await.remove(0);
    service.start(&machine.name, &Caller::daemon()).await.unwrap();
    pair.node.host.checks_fail.store(true, Ordering::SeqCst);
    let begun = begin_drain(&service, Caller::admin("anna"), "own".to_owned()).await;
    begun.map_err(|failure| failure.0).unwrap();
    let outcome = outcome_of_task(&pair).await;
    assert!(outcome.contains("stays: host 'b' cannot run it") && outcome.contains("swtpm"), "{outcome}");
    assert!(service.active(machine.uuid).is_some());
    assert!(pair.controller.host.stops.lock().unwrap().is_empty());
    assert!(!service.record("class-1").await.unwrap().to_start);
}

#[tokio::test]
async fn a_machine_goes_on_while_its_new_host_is_away() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("own", 1).await.remove(0);
    service.start(&machine.name, &Caller::daemon()).await.unwrap();
    let turn = service.lock(machine.uuid).await;
    let begun = begin_drain(&service, Caller::admin("anna"), "own".to_owned()).await;
    begun.map_err(|failure| failure.0).unwrap();
    until("the move waits for the turn", async || service.at_turn(machine.uuid) == 2).await;
    connection.abort();
    until("the node is away", async || service.fleet().connecting().is_empty()).await;
    drop(turn);
    // An admin cancels it, because the node does not come back.
    let id = pair.controller.db.read().await.unwrap().tasks().unended().await.unwrap()[0].id;
    service.cancel_live(id);
    let outcome = outcome_of_task(&pair).await;
    assert!(outcome.contains("was cancelled: 0 machine(s) were moved"), "{outcome}");
    assert!(service.active(machine.uuid).is_some());
    assert!(pair.controller.host.stops.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_machine_that_is_claimed_before_its_move_stays() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("own", 1).await.remove(0);
    service.start(&machine.name, &Caller::daemon()).await.unwrap();
    let turn = service.lock(machine.uuid).await;
    let begun = begin_drain(&service, Caller::admin("anna"), "own".to_owned()).await;
    begun.map_err(|failure| failure.0).unwrap();
    until("the move waits for the turn", async || service.at_turn(machine.uuid) == 2).await;
    let claim = headwater_db::ClaimRecord {
        id: Uuid::from_u128(77),
        machine: machine.uuid,
        holder: "ben".to_owned(),
        key: None,
        claimed_by: "anna".to_owned(),
        created_at_ms: 0,
        expires_at_ms: None,
        reset_on: headwater_api::ResetOn::default(),
        ended: None,
    };
    let mut repo = pair.controller.db.write().await.unwrap();
    repo.claims().add(&claim).await.unwrap();
    repo.save().await.unwrap();
    drop(turn);
    let outcome = outcome_of_task(&pair).await;
    assert!(outcome.contains("is claimed for ben"), "{outcome}");
    assert!(service.active(machine.uuid).is_some());
    assert_eq!(service.record("class-1").await.unwrap().host, own_host().id);
}

impl Pair {
    /// Has a node end machines when its lease is over.
    fn keep_fence(&self, node: &Fixture) {
        let (node, stop) = (node.service.clone(), self.stop.subscribe());
        tokio::spawn(async move { node.keep_fence(stop).await });
    }

    /// A machine of the node `b` that runs, and that another host may start.
    async fn restarted_elsewhere(&self) -> MachineRecord {
        let machine = self.class_on("b", 1).await.remove(0);
        let service = &self.controller.service;
        until("a machine starts", async || service.start(&machine.name, &Caller::daemon()).await.is_ok())
            .await;
        machine
    }
}

#[tokio::test]
async fn a_host_that_returns_does_not_start_removed_machines() {
    let pair = Pair::new().await;
    pair.controller.service.leases_last(1_000);
    let connection = pair.connect().await;
    pair.keep_fence(&pair.node);
    let machine = pair.restarted_elsewhere().await;
    connection.abort();
    until("the node has ended it", async || pair.node.service.active(machine.uuid).is_none()).await;
    let mut repo = pair.controller.db.write().await.unwrap();
    repo.machines().remove(machine.uuid).await.unwrap();
    repo.save().await.unwrap();
    let _connection = pair.connect().await;
    until("its copy is gone", async || pair.node.service.own_machines().await.unwrap().is_empty()).await;
    assert!(pair.node.service.active(machine.uuid).is_none());
}

#[tokio::test]
async fn a_machine_that_is_given_back_to_a_returned_host_stays_there() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("b", 1).await.remove(0);
    let link = service.link(machine.host).unwrap();
    until("nothing of other hosts is there", async || link.is_cleared.load(Ordering::SeqCst)).await;
    pair.give(machine.uuid, own_host().id).await;
    let clearing = {
        let (service, link) = (service.clone(), link.clone());
        async move { service.remove_moved(&link).await.unwrap() }
    };
    pair.move_before(machine.uuid, machine.host, clearing).await;
    assert!(pair.node.service.record_of(machine.uuid, "class-1").await.is_ok());
    // If it is still another host's then, it is removed.
    pair.give(machine.uuid, own_host().id).await;
    service.remove_moved(&link).await.unwrap();
    assert!(pair.node.service.record_of(machine.uuid, "class-1").await.is_err());
}

#[tokio::test]
async fn a_second_loss_does_not_forget_that_a_machine_is_to_be_started() {
    let pair = Pair::new().await;
    let service = &pair.controller.service;
    service.leases_last(1_000);
    let connection = pair.connect().await;
    let machine = pair.class_on("b", 1).await.remove(0);
    connection.abort();
    until("the node is away", async || service.fleet().connecting().is_empty()).await;
    // It was moved to this node, which has said that it is off, and was not started yet.
    let mut repo = pair.controller.db.write().await.unwrap();
    let record = repo.machines().by_uuid(machine.uuid).await.unwrap().unwrap();
    repo.machines().set_host(&MachineRecord { to_start: true, ..record }).await.unwrap();
    repo.machines().set_fenced(machine.uuid, true).await.unwrap();
    repo.save().await.unwrap();
    until("it runs on the third host", async || {
        service.look_after_lost_hosts().await.unwrap();
        service.active(machine.uuid).is_some()
    })
    .await;
}

#[tokio::test]
async fn a_machine_leaves_a_host_that_is_lost_before_it_has_it() {
    let pair = Pair::new().await;
    let service = pair.controller.service.clone();
    service.leases_last(1_000);
    let (b, c) = (Uuid::from_u128(2), Uuid::from_u128(3));
    let connection = pair.connect().await;
    let other = pair.another_node("c", c).await;
    let dying = pair.connect_as(&other, "c").await;
    for (host, node) in [(b, &pair.node), (c, &other)] {
        pair.keep_fence(node);
        let link = service.link(host).unwrap();
        until("a node is ready", async || link.is_cleared.load(Ordering::SeqCst)).await;
    }
    let machine = pair.restarted_elsewhere().await;
    pair.cordon_own(true).await;
    // The other host takes no machine, and its node still answers.
    other.db.fails.store(true, Ordering::SeqCst);
    connection.abort();
    let host = async || service.record("class-1").await.unwrap().host;
    until("the other host has it", async || {
        service.look_after_lost_hosts().await.unwrap();
        host().await == c
    })
    .await;
    dying.abort();
    pair.cordon_own(false).await;
    until("it runs on the third host", async || {
        service.look_after_lost_hosts().await.unwrap();
        service.active(machine.uuid).is_some()
    })
    .await;
}

impl Pair {
    async fn cordon_own(&self, cordoned: bool) {
        let mut repo = self.controller.db.write().await.unwrap();
        let own = repo.hosts().by_id(own_host().id).await.unwrap().unwrap();
        repo.hosts().update(&headwater_db::HostRecord { cordoned, ..own }).await.unwrap();
        repo.save().await.unwrap();
    }
}

#[tokio::test]
async fn a_machine_that_the_guard_ended_is_started_again() {
    let pair = Pair::new().await;
    pair.controller.service.leases_last(1_000);
    let connection = pair.connect().await;
    let machine = pair.restarted_elsewhere().await;
    connection.abort();
    let noted = async || pair.node.service.record("class-1").await.unwrap();
    until("the lease is over", async || pair.node.service.is_fenced_off(&noted().await)).await;
    // The daemon has not ended it, and QEMU was killed by a signal.
    pair.node.vm().end(VmExit::Crashed { reason: "signal 9".to_owned() });
    until("that is noted", async || noted().await.state == MachineState::Stopped).await;
    let record = noted().await;
    assert!(record.reason.is_some_and(|reason| reason.contains("lease")) && record.wanted == Wanted::Running);
    pair.keep_fence(&pair.node);
    let _connection = pair.connect().await;
    until("it is on again", async || pair.node.service.active(machine.uuid).is_some()).await;
}

#[tokio::test]
async fn machines_that_do_not_start_keep_no_other_off() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let there = pair.class_on("b", 8).await;
    pair.node.host.start_fails.store(true, Ordering::SeqCst);
    let request = r#"{"name":"zed","catalog":"class","host":"own"}"#;
    let request: CreateMachine = serde_json::from_str(request).unwrap();
    let here = create_machine::make(&service, &Caller::daemon(), request).await;
    let here = here.map_err(|failure| failure.0).unwrap();
    for machine in there.iter().chain([&here]) {
        service.is_to_start(machine.uuid).await.unwrap();
    }
    until("the last one is on", async || {
        service.look_after_lost_hosts().await.unwrap();
        service.active(here.uuid).is_some()
    })
    .await;
    // A stop ends the attempts.
    service.stop("class-1", false, &Caller::daemon()).await.unwrap();
    assert!(!service.record("class-1").await.unwrap().to_start);
}

#[tokio::test]
async fn the_guard_forgets_the_name_of_a_removed_machine() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    pair.class_on("b", 2).await;
    let path = pair.node.dir.path().join("lease.json");
    let named = || crate::fleet::fence::LeaseFile::read(&path).map(|file| file.machines.len());
    assert_eq!(named(), Some(2));
    pair.controller.service.remove("class-1", false, &Caller::daemon()).await.unwrap();
    assert_eq!(named(), Some(1));
    // A machine of the name of a fenced one that the node has not heard to be gone.
    pair.node.service.is_fenced(Uuid::from_u128(9), "class-2", false).await;
    assert_eq!(named(), None);
}
