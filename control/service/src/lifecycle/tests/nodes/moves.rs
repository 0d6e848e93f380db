//! Machines that go to another host: by a drain, or because their host is lost.

use super::*;

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
    // What waits to be removed is removed where it is by then.
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
