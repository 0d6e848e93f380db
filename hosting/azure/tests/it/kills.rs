//! Tests that 50 machines exist exactly once though the client is killed before and after its requests, and that the
//! life of a machine is the same whatever fault each request meets.
//!
//! A kill drops the client at one request; the request was executed or not. A new client continues with the same
//! journal. In one run the client is killed once for each machine, at a request that depends on the machine.
//! `HEADWATER_AZURE_KILLS=all` runs it for every request of every machine; else two of these runs are made. The same
//! variable gives each request of a machine's life each fault; else every sixth request gets one.

use std::cell::Cell;

use futures_util::StreamExt;
use futures_util::stream;
use headwater_azure::machines::{Place, WhenOff};
use headwater_azure::{AzureError, Machines};
use headwater_testkit_azure::arm::{ArmFault, FaultRule, Size};

use crate::lab::{Lab, choice, id, scope, spec};

const MACHINES: usize = 50;

/// Continues the work of the last client.
async fn create_all(lab: &Lab) -> Result<(), AzureError> {
    let arm = lab.arm();
    arm.recover().await?;
    let machines = Machines::new(arm, scope(), lab.clock.clone());
    let machines = &machines;
    let creations = stream::iter(0..MACHINES)
        .map(|number| async move { machines.create(&id(number), &spec(number)).await });
    let created: Vec<_> = creations.buffer_unordered(MACHINES).collect().await;
    created.into_iter().try_for_each(|it| it.map(drop))
}

/// Runs clients one after the other, each until it is killed. Returns the number of clients.
async fn create_all_though_killed(lab: &Lab) -> usize {
    for clients in 1.. {
        tokio::select! {
            created = create_all(lab) => {
                created.unwrap();
                return clients;
            }
            () = lab.server.killed.notified() => {}
        }
    }
    unreachable!("a client was not killed, but has not created all machines")
}

fn assert_each_machine_exists_once(lab: &Lab, when: &str) {
    let mut expected: Vec<String> =
        (0..MACHINES).map(|number| format!("hw-{}", id(number).as_str())).collect();
    expected.sort();
    assert_eq!(lab.there(), (expected.clone(), expected), "{when}");
    let management = lab.server.management();
    for number in 0..MACHINES {
        for path in [id(number).machine_path(&scope()), id(number).network_path(&scope())] {
            let state = management.resources[&path]["properties"]["provisioningState"].as_str();
            assert_eq!((management.created[&path], state), (1, Some("Succeeded")), "{when}: {path}");
        }
        let machine = &management.machines[&id(number).machine_path(&scope())];
        assert_eq!((machine.boots, machine.reimages), (1, 0), "{when}");
    }
    assert_eq!((management.changed, management.over_replicas), (0, 0), "{when}");
    assert_eq!(management.count("DELETE", ""), 0, "{when}");
    let lists = management.log.iter().filter(|it| it.path.ends_with("/virtualMachines")).count();
    assert_eq!(lists, 0, "{when}");
    assert!(lab.journal.is_empty(), "{when}");
}

/// Creates all machines once without a kill. Returns the most requests of one machine.
async fn requests_of_a_machine() -> usize {
    let lab = Lab::new(3).await;
    create_all(&lab).await.unwrap();
    assert_each_machine_exists_once(&lab, "nobody was killed");
    let management = lab.server.management();
    assert_eq!(management.throttled, 0);
    management.requests / MACHINES
}

#[tokio::test]
async fn fifty_machines_exist_once_though_the_client_is_killed_at_any_request() {
    let steps = requests_of_a_machine().await;
    assert!(steps >= 8, "{steps}");
    let runs = if std::env::var("HEADWATER_AZURE_KILLS").is_ok_and(|it| it == "all") { 2 * steps } else { 2 };
    for run in 0..runs {
        let lab = Lab::new(3).await;
        let rules = (0..MACHINES).map(|number| FaultRule {
            method: None,
            contains: id(number).as_str().to_owned(),
            skip: (number + run / 2) % steps,
            fault: if (number + run) % 2 == 0 { ArmFault::KillBefore } else { ArmFault::KillAfter },
        });
        lab.server.management().rules = rules.collect();
        lab.server.management().lag = run % 3;
        let clients = create_all_though_killed(&lab).await;
        // One kill may end several requests at once.
        assert!(clients > MACHINES / 4, "{clients}");
        assert_each_machine_exists_once(&lab, &format!("run {run}, {clients} clients"));
    }
}

/// The life of a machine. A client that is killed in a step is followed by a client that repeats the step.
const STEPS: usize = 7;

async fn step(machines: &Machines, number: usize) -> Result<(), AzureError> {
    let (machine, mut wanted) = (id(1), spec(1));
    wanted.choices.push(choice("Standard_E8ds_v5", "E", Place::Temp));
    match number {
        0 => machines.create(&machine, &wanted).await.map(drop),
        1 | 3 => machines.reset(&machine, &wanted).await.map(drop),
        2 => machines.restart(&machine).await,
        4 => machines.stop(&machine, WhenOff::Delete).await,
        5 => machines.start(&machine, &wanted).await.map(drop),
        _ => machines.remove(&machine).await,
    }
}

async fn live(lab: &Lab, done: &Cell<usize>) -> Result<(), AzureError> {
    let arm = lab.arm();
    arm.recover().await?;
    let machines = Machines::new(arm, scope(), lab.clock.clone());
    while done.get() < STEPS {
        step(&machines, done.get()).await?;
        done.set(done.get() + 1);
    }
    Ok(())
}

/// Lives with a fault at one request. Without capacity, creations of the first size begin and fail. Returns the number of
/// requests.
async fn live_though(at: usize, fault: Option<ArmFault>, has_capacity: bool) -> usize {
    let (lab, done) = (Lab::new(1).await, Cell::new(0));
    {
        let mut management = lab.server.management();
        management.faults.extend(fault.map(|fault| (at, fault)));
        let size = |name: &str| Size::new(name, name, 8, "ResourceDisk");
        management.sizes = vec![size("Standard_D8ds_v5"), size("Standard_E8ds_v5")];
        if !has_capacity {
            management.sizes[0].capacity.insert(String::new(), 0);
        }
    }
    loop {
        tokio::select! {
            lived = live(&lab, &done) => {
                lived.unwrap_or_else(|error| panic!("{fault:?} at {at}, step {}: {error}", done.get()));
                break;
            }
            () = lab.server.killed.notified() => {}
        }
    }
    let when = format!("{fault:?} at {at}, capacity {has_capacity}");
    assert_eq!(lab.there(), (vec![], vec![]), "{when}");
    assert!(lab.journal.is_empty(), "{when}");
    let management = lab.server.management();
    let machine = id(1).machine_path(&scope());
    assert_eq!(management.changed, 0, "{when}");
    // Created and, after it was off, created again. Each client tries the first size once.
    let created = management.created[&machine];
    assert!(if has_capacity { created == 2 } else { (3..=4).contains(&created) }, "{when}: {created}");
    assert_eq!(management.created[&id(1).network_path(&scope())], 1, "{when}");
    management.requests
}

#[tokio::test]
async fn the_life_of_a_machine_survives_each_fault_at_each_request() {
    let faults = [
        ArmFault::KillBefore,
        ArmFault::KillAfter,
        ArmFault::CutBefore,
        ArmFault::CutAfter,
        ArmFault::Unavailable,
        ArmFault::Unauthorized,
        ArmFault::Throttled,
    ];
    let all = std::env::var("HEADWATER_AZURE_KILLS").is_ok_and(|it| it == "all");
    for has_capacity in [true, false] {
        let requests = live_though(0, None, has_capacity).await;
        assert!(requests > 40, "{requests}");
        for at in (0..requests).step_by(if all { 1 } else { 6 }) {
            let chosen = if all { &faults[..] } else { std::slice::from_ref(&faults[at / 6 % faults.len()]) };
            for fault in chosen {
                live_though(at, Some(*fault), has_capacity).await;
            }
        }
    }
}

#[tokio::test]
async fn a_throttled_client_sends_nothing_until_azure_permits() {
    let lab = Lab::new(3).await;
    lab.server.management().faults = (0..200).map(|number| (number * 7, ArmFault::Throttled)).collect();
    create_all(&lab).await.unwrap();
    assert_each_machine_exists_once(&lab, "throttled");
    let management = lab.server.management();
    let throttled: Vec<_> = management.log.iter().filter(|it| it.status == 429).collect();
    assert!(throttled.len() > 20, "{}", throttled.len());
    for one in throttled {
        // Requests at the same instant were sent before the answer.
        let early = management
            .log
            .iter()
            .find(|it| it.at > one.at && it.at < one.at + std::time::Duration::from_secs(3));
        assert!(early.is_none(), "{early:?} after {one:?}");
    }
}
