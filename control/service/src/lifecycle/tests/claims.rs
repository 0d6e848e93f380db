//! Claims: who gets a machine, and in what state.

use std::collections::{HashMap, HashSet};

use headwater_api::{Claim, ClaimRequest, Hours, ResetOn};
use headwater_db::{CatalogRecord, PoolRecord};

use super::*;
use crate::answer::Explain;
use crate::claims::ClaimError;

fn wish(holder: &str) -> ClaimRequest {
    let holder = holder.to_owned();
    ClaimRequest { holder, ttl_s: None, wait_s: None, key: None, secret: false, reset_on: ResetOn::Shutdown }
}

fn waiting(holder: &str) -> ClaimRequest {
    ClaimRequest { wait_s: Some(120), ..wish(holder) }
}

/// Adds the catalog `class` with so many machines, `class-1` and so on.
pub(super) async fn class(fixture: &Fixture, machines: usize, keep_ready: u32) {
    let lab = fixture.record().await;
    let catalog = CatalogRecord {
        name: "class".to_owned(),
        image: "image".to_owned(),
        pin: None,
        scheme: 1,
        cache: lab.cache,
        transport: lab.transport,
        memory_bytes: lab.memory_bytes,
        cpus: lab.cpus,
        platform: lab.platform.clone(),
        user_data: None,
        name_rule: "class-#".to_owned(),
        first_number: 1,
        keep_ready,
        ready_hours: None,
        stop_idle_s: 0,
        seal_removes: Vec::new(),
        on_host_loss: headwater_api::OnHostLoss::Wait,
        cloud: None,
        created_at_ms: 0,
    };
    let mut repo = fixture.db.write().await.unwrap();
    repo.catalogs().add(&catalog).await.unwrap();
    for number in 1..=machines {
        let name = format!("class-{number}");
        let new = crate::identity::make(&SystemRandom, &name, None).unwrap();
        let (uuid, mac, identity) = (new.uuid, new.mac, new.identity);
        let catalog = Some("class".to_owned());
        let machine = MachineRecord { uuid, name, mac, identity, catalog, ..lab.clone() };
        repo.machines().add(&machine).await.unwrap();
    }
    repo.save().await.unwrap();
    fixture.host.boots.send_replace(true);
}

/// Looks after machines, claims and pools as the daemon does.
fn keep(service: &Service) -> tokio::task::JoinHandle<()> {
    let service = service.clone();
    tokio::spawn(async move { service.keep_reconciling().await })
}

async fn claim(fixture: &Fixture, request: ClaimRequest) -> Result<Claim, ClaimError> {
    fixture.service.claim(Caller::admin("broker"), "class".to_owned(), request).await
}

async fn claims(fixture: &Fixture) -> Vec<Claim> {
    fixture.service.claims(None).await.unwrap()
}

#[tokio::test]
async fn machines_are_kept_ready_and_one_that_is_claimed_is_replaced() {
    let fixture = Fixture::new().await;
    class(&fixture, 4, 2).await;
    assert!(matches!(
        claim(&fixture, wish("anna")).await,
        Err(ClaimError::NoneReady { machines: 4, claimed: 0, .. })
    ));
    let keeping = keep(&fixture.service);
    let on = || fixture.service.active_map().len();
    until("two are on", async || on() == 2).await;
    let first = claim(&fixture, waiting("anna")).await.unwrap();
    assert_eq!((first.holder.as_str(), first.ended.as_deref()), ("anna", None));
    until("two others are on", async || on() == 3).await;
    let second = claim(&fixture, waiting("bert")).await.unwrap();
    assert_ne!(first.machine, second.machine);
    until("all are on", async || on() == 4).await;
    // Enough are ready, so these are switched off.
    for released in [&first.machine, &second.id.to_string()] {
        fixture.service.release(&Caller::admin("broker"), released).await.unwrap();
    }
    until("both claims are gone", async || claims(&fixture).await.is_empty()).await;
    assert_eq!(on(), 2);
    let said = async |action: &'static str| {
        fixture.events().await.iter().filter(|event| event.action == action).count()
    };
    assert_eq!((said("claimed").await, said("claim ended").await), (2, 2));
    keeping.abort();
}

#[tokio::test]
async fn a_pool_follows_the_clock_and_leaves_machines_that_are_used() {
    const HOUR_MS: u64 = 3_600_000;
    let fixture = Fixture::new().await;
    class(&fixture, 4, 3).await;
    // Monday, 2026-11-30, 06:59 in Berlin.
    let monday_ms = 1_795_996_800_000 + 6 * HOUR_MS - 60_000;
    fixture.host.now_ms.store(monday_ms, Ordering::SeqCst);
    let pool = PoolRecord {
        catalog: "class".to_owned(),
        keep_ready: 3,
        ready_hours: Some(Hours::parse("mon-fri 07:00-19:00 Europe/Berlin").unwrap()),
        stop_idle_s: 600,
    };
    let mut repo = fixture.db.write().await.unwrap();
    repo.catalogs().set_pool(&pool).await.unwrap();
    repo.save().await.unwrap();
    let on = || fixture.service.active_map().len();
    let keeping = keep(&fixture.service);
    // A claim that waits gets a machine before the hours, too.
    let early = claim(&fixture, waiting("anna")).await.unwrap();
    assert_eq!(on(), 1);
    fixture.host.now_ms.store(monday_ms + 60_000, Ordering::SeqCst);
    until("three are ready beside the claimed one", async || on() == 4).await;
    // Somebody works in one of them without a claim.
    let all_on = || fixture.service.active_map().values().cloned().collect::<Vec<_>>();
    let free = all_on().into_iter().find(|it| it.name != early.machine).unwrap();
    until("it is up", async || {
        fixture.service.record(&free.name).await.unwrap().state == MachineState::Running
    })
    .await;
    free.use_it().unwrap();
    // 19:00: those that nobody has are switched off ten minutes later, and no machine is started.
    fixture.host.now_ms.store(monday_ms + 60_000 + 12 * HOUR_MS, Ordering::SeqCst);
    until("the pool has seen the end of its hours", async || {
        fixture.service.keep_pools().await.unwrap();
        fixture.service.claims_state().pool_excess("class") == 2
    })
    .await;
    assert_eq!(on(), 4);
    fixture.host.now_ms.store(monday_ms + 60_000 + 12 * HOUR_MS + 600_000, Ordering::SeqCst);
    until("two are left", async || on() == 2).await;
    let mut left: Vec<_> = all_on().iter().map(|it| it.name.clone()).collect();
    left.sort();
    let mut expected = vec![early.machine.clone(), free.name.clone()];
    expected.sort();
    assert_eq!(left, expected);
    // A machine that is given back in the evening is reset and not kept on.
    fixture.service.release(&Caller::admin("broker"), &early.machine).await.unwrap();
    until("it is off", async || on() == 1).await;
    keeping.abort();
}

#[tokio::test]
async fn a_claim_ends_with_its_time_and_with_its_machine() {
    let fixture = Fixture::new().await;
    class(&fixture, 1, 1).await;
    let keeping = keep(&fixture.service);
    let short = ClaimRequest { ttl_s: Some(60), ..waiting("anna") };
    let first = claim(&fixture, short).await.unwrap();
    let created_at_ms = first.created_at_ms;
    let vms = || fixture.host.vms.lock().unwrap().len();
    let before = vms();
    fixture.host.now_ms.store(first.created_at_ms + 59_999, Ordering::SeqCst);
    fixture.service.look_after_claims().await.unwrap();
    assert_eq!(claims(&fixture).await, [first]);
    fixture.host.now_ms.store(created_at_ms + 60_000, Ordering::SeqCst);
    until("its time is over", async || claims(&fixture).await.is_empty()).await;
    assert_eq!(vms(), before + 1, "it was not reset");

    let second = claim(&fixture, waiting("bert")).await.unwrap();
    // A guest that restarts gets a pristine disk, and its holder goes on.
    fixture.vm().end(VmExit::Rebooted);
    until("it has started again", async || vms() == before + 2).await;
    fixture.service.look_after_claims().await.unwrap();
    assert_eq!(claims(&fixture).await, [second]);
    fixture.vm().end(VmExit::PoweredOff);
    until("its machine is off", async || claims(&fixture).await.is_empty()).await;
    claim(&fixture, waiting("carl")).await.unwrap();
    keeping.abort();
}

#[tokio::test]
async fn a_machine_that_somebody_worked_in_is_given_to_nobody() {
    let fixture = Fixture::new().await;
    class(&fixture, 1, 0).await;
    fixture.service.start("class-1", &Caller::daemon()).await.unwrap();
    let machine = fixture.service.record("class-1").await.unwrap();
    until("it is up", async || {
        fixture.service.record("class-1").await.unwrap().state == MachineState::Running
    })
    .await;
    fixture.service.active(machine.uuid).unwrap().use_it().unwrap();
    assert!(matches!(claim(&fixture, wish("anna")).await, Err(ClaimError::NoneReady { .. })));
    fixture.service.reset("class-1", &Caller::daemon()).await.unwrap();
    let claimed = claim(&fixture, waiting("anna")).await.unwrap();
    assert_eq!(claimed.machine, "class-1");
}

#[tokio::test]
async fn a_later_daemon_knows_whether_a_machine_was_used() {
    let fixture = Fixture::new().await;
    class(&fixture, 1, 0).await;
    fixture.service.start("class-1", &Caller::daemon()).await.unwrap();
    let machine = fixture.service.record("class-1").await.unwrap();
    let run = fixture.service.active(machine.uuid).unwrap();
    let dir = fixture.service.run_dir("class-1");
    let taken_over = || {
        let (disk, vm) = (run.disk.clone(), run.vm.clone());
        let active = crate::lifecycle::Active::new(
            ("class-1".to_owned(), None),
            disk,
            vm,
            String::new(),
            std::time::Instant::now(),
        );
        active.read_unused_note(&dir);
        active
    };
    assert!(!taken_over().is_used());
    // Also if somebody works in it only after it was taken over.
    taken_over().use_it().unwrap();
    assert!(taken_over().is_used());
    // The note of an earlier run says nothing of this one.
    std::fs::write(dir.join("unused"), "7").unwrap();
    assert!(taken_over().is_used());
}

#[tokio::test]
async fn a_claim_that_is_asked_for_again_is_the_same() {
    let fixture = Fixture::new().await;
    class(&fixture, 2, 2).await;
    let keeping = keep(&fixture.service);
    let wish = ClaimRequest { key: Some("job 7".to_owned()), ..waiting("ci") };
    let (first, second) =
        (claim(&fixture, wish.clone()).await.unwrap(), claim(&fixture, wish.clone()).await.unwrap());
    assert_eq!(first, second);
    assert_eq!(first.key.as_deref(), Some("job 7"));
    // The same key in another catalog is another claim's.
    let mut repo = fixture.db.write().await.unwrap();
    let class = repo.catalogs().by_name("class").await.unwrap().unwrap();
    repo.catalogs().add(&CatalogRecord { name: "other".to_owned(), keep_ready: 0, ..class }).await.unwrap();
    repo.save().await.unwrap();
    let of_other = ClaimRequest { wait_s: None, ..wish.clone() };
    let refused = fixture.service.claim(Caller::admin("broker"), "other".to_owned(), of_other).await;
    assert!(matches!(refused, Err(ClaimError::NoneReady { machines: 0, .. })), "{refused:?}");
    // While the machine is reset nobody gets it, also not by this key.
    fixture.host.starts_wait.store(true, Ordering::SeqCst);
    fixture.service.release(&Caller::admin("broker"), &first.machine).await.unwrap();
    let error = claim(&fixture, wish.clone()).await.unwrap_err();
    assert!(matches!(error, ClaimError::KeyEnded { .. }), "{error}");
    assert_eq!(error.kind(), ProblemKind::Conflict);
    fixture.host.starts_wait.store(false, Ordering::SeqCst);
    fixture.host.go_on.notify_waiters();
    keeping.abort();
}

#[tokio::test]
async fn a_holder_gets_addresses_and_a_secret_that_is_nowhere_else() {
    let fixture = Fixture::new().await;
    class(&fixture, 1, 1).await;
    fixture.host.addresses.lock().unwrap().push("192.0.2.7".parse().unwrap());
    let keeping = keep(&fixture.service);
    let wish = ClaimRequest { secret: true, key: Some("job 7".to_owned()), ..waiting("anna") };
    let claimed = claim(&fixture, wish.clone()).await.unwrap();
    assert_eq!(claimed.console, format!("headwater machine console {}", claimed.machine));
    assert_eq!(claimed.addresses, ["192.0.2.7".parse::<std::net::IpAddr>().unwrap()]);
    let secret = claimed.secret.clone().unwrap().0;
    assert_eq!(secret.len(), 32);
    let given = || fixture.host.exec_inputs.lock().unwrap().clone();
    let noted: serde_json::Value = serde_json::from_str(&given()[0]).unwrap();
    assert_eq!((noted["secret"].as_str(), noted["for"].as_str()), (Some(secret.as_str()), Some("anna")));
    // No later answer has the secret, and no copy is left.
    assert_eq!(claims(&fixture).await[0].secret, None);
    assert!(!format!("{claimed:?}").contains(&secret));
    let events = format!("{:?}", fixture.events().await);
    assert!(!events.contains(&secret), "{events}");
    // A client that lost the answer gets another secret for the same machine.
    let again = claim(&fixture, wish.clone()).await.unwrap();
    assert_eq!(again.id, claimed.id);
    assert_ne!(again.secret.unwrap().0, secret);
    assert_eq!(given().len(), 2);
    // If the guest does not take it, the holder keeps the machine.
    fixture.host.exec_code.store(3, Ordering::SeqCst);
    let refused = claim(&fixture, wish).await.unwrap_err();
    assert!(matches!(refused, ClaimError::Secret { .. }), "{refused}");
    assert_eq!((claims(&fixture).await[0].id, claims(&fixture).await[0].ended.clone()), (claimed.id, None));
    keeping.abort();
}

#[tokio::test]
async fn a_claim_whose_guest_does_not_take_its_secret_ends() {
    let fixture = Fixture::new().await;
    class(&fixture, 1, 1).await;
    let keeping = keep(&fixture.service);
    fixture.host.exec_code.store(3, Ordering::SeqCst);
    let refused = claim(&fixture, ClaimRequest { secret: true, ..waiting("anna") }).await.unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::Failed);
    let given = fixture.host.exec_inputs.lock().unwrap().pop().unwrap();
    let secret = serde_json::from_str::<serde_json::Value>(&given).unwrap()["secret"].to_string();
    let told = refused.to_string();
    assert!(told.contains("exit code 3") && told.contains("(secret)"), "{told}");
    assert!(!told.contains(secret.trim_matches('"')), "{told}");
    // Its machine is reset, and somebody else can have it.
    until("the claim is gone", async || claims(&fixture).await.is_empty()).await;
    claim(&fixture, waiting("bert")).await.unwrap();
    keeping.abort();
}

#[tokio::test]
async fn a_claim_ends_when_its_user_logs_off_if_that_is_asked_for() {
    let fixture = Fixture::new().await;
    class(&fixture, 2, 2).await;
    let keeping = keep(&fixture.service);
    let logoff =
        claim(&fixture, ClaimRequest { reset_on: ResetOn::Logoff, ..waiting("anna") }).await.unwrap();
    let other = claim(&fixture, waiting("bert")).await.unwrap();
    let active = fixture.service.record(&logoff.machine).await.unwrap().uuid;
    let active = fixture.service.active(active).unwrap();
    // Nobody has logged in yet: it goes on.
    assert!(!active.guest().saw_users(0));
    assert!(!active.guest().saw_users(2));
    // An answer of nobody may be wrong. The next look of the daemon finds nobody too.
    assert!(!active.guest().saw_users(0));
    until("the claim ended", async || claims(&fixture).await.len() == 1).await;
    assert_eq!(claims(&fixture).await[0].id, other.id);
    let events = fixture.events().await;
    assert!(
        events.iter().any(|event| event.detail.contains("of anna: its user has logged off")),
        "{events:?}"
    );
    keeping.abort();
}

#[tokio::test]
async fn what_cannot_be_claimed_is_refused() {
    let fixture = Fixture::new().await;
    class(&fixture, 1, 0).await;
    for odd in [
        wish(""),
        wish("a\nb"),
        wish(&"x".repeat(201)),
        ClaimRequest { ttl_s: Some(0), ..wish("anna") },
        ClaimRequest { wait_s: Some(3601), ..wish("anna") },
        ClaimRequest { key: Some(String::new()), ..wish("anna") },
    ] {
        let error = claim(&fixture, odd.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ProblemKind::Invalid, "{odd:?}: {error}");
    }
    let caller = Caller::admin("broker");
    let unknown =
        fixture.service.claim(caller.clone(), "nothing".to_owned(), wish("anna")).await.unwrap_err();
    assert_eq!(unknown.kind(), ProblemKind::NotFound);
    let unknown = fixture.service.release(&caller, "class-1").await.unwrap_err();
    assert!(matches!(unknown, ClaimError::Unknown(_)));
    assert!(claims(&fixture).await.is_empty());
}

#[tokio::test]
async fn a_daemon_that_died_has_no_claims() {
    let fixture = Fixture::new().await;
    class(&fixture, 2, 1).await;
    let keeping = keep(&fixture.service);
    let first = claim(&fixture, waiting("anna")).await.unwrap();
    keeping.abort();
    let after = Fixture::service(fixture.db.clone(), &fixture.host, fixture.dir.path());
    after.recover().await.unwrap();
    assert!(after.claims(None).await.unwrap().is_empty());
    let events = fixture.events().await;
    let is_said = |it: &headwater_api::Event| {
        it.action == "claim ended" && it.subject == format!("machine {}", first.machine)
    };
    assert!(events.iter().any(is_said), "{events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_machine_has_two_holders_and_none_is_handed_out_used() {
    claim_at_random(5, 2, 12, 25).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "a figure, of 1,000 claims by 50 clients"]
async fn a_thousand_claims_by_50_clients() {
    claim_at_random(120, 60, 50, 20).await;
}

/// Clients claim, use and release machines at random, guests restart, crash and switch themselves off, and somebody resets and stops
/// machines meanwhile. A machine has one holder, and no holder gets a run of a machine that another one has used.
async fn claim_at_random(machines: usize, keep_ready: u32, clients: u64, rounds: u64) {
    let fixture = Arc::new(Fixture::new().await);
    class(&fixture, machines, keep_ready).await;
    let keeping = keep(&fixture.service);
    /// Who has a machine, and which runs were used.
    #[derive(Default)]
    struct Seen {
        holders: HashMap<String, u64>,
        used: HashSet<usize>,
        took: Vec<Duration>,
    }
    until("the pool is ready", async || fixture.service.active_map().len() >= keep_ready as usize).await;
    let seen = Arc::new(Mutex::new(Seen::default()));
    let clients = (0..clients).map(|client| {
        let (fixture, seen) = (fixture.clone(), seen.clone());
        tokio::spawn(async move {
            for round in 0..rounds {
                let holder = format!("client {client}");
                let asked_at = std::time::Instant::now();
                let at_once = claim(&fixture, wish(&holder)).await;
                let took = at_once.is_ok().then(|| asked_at.elapsed());
                let claimed = match at_once {
                    Ok(claimed) => claimed,
                    Err(ClaimError::NoneReady { .. }) => claim(&fixture, waiting(&holder)).await.unwrap(),
                    Err(error) => panic!("{error}"),
                };
                let uuid = fixture.service.record(&claimed.machine).await.unwrap().uuid;
                // All VMs are kept by the host, so an address is that of one of them for ever.
                let run =
                    fixture.service.active(uuid).map(|active| Arc::as_ptr(&active.vm).cast::<()>() as usize);
                {
                    let mut seen = seen.lock().unwrap();
                    seen.took.extend(took);
                    let before = seen.holders.insert(claimed.machine.clone(), client);
                    assert_eq!(before, None, "{} has two holders", claimed.machine);
                    // It may have been reset by now.
                    if let Some(run) = run {
                        assert!(seen.used.insert(run), "{} was handed out used", claimed.machine);
                    }
                }
                tokio::time::sleep(Duration::from_millis((client * 7 + round * 3) % 20)).await;
                seen.lock().unwrap().holders.remove(&claimed.machine);
                let end = |exit: VmExit| {
                    let vms = fixture.host.vms.lock().unwrap().clone();
                    let vm = vms.iter().find(|vm| Some(Arc::as_ptr(vm).cast::<()>() as usize) == run);
                    vm.inspect(|vm| vm.end(exit));
                };
                match (client + round) % 4 {
                    0 => end(VmExit::PoweredOff),
                    1 => end(VmExit::Rebooted),
                    2 => end(VmExit::Crashed { reason: "signal 11".to_owned() }),
                    _ => {}
                }
                // By its id: the claim may have ended with its machine, which somebody else may have by now.
                match fixture.service.release(&Caller::admin("broker"), &claimed.id.to_string()).await {
                    Ok(_) | Err(ClaimError::Unknown(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    let disturbing = tokio::spawn({
        let fixture = fixture.clone();
        async move {
            for number in 0.. {
                let name = format!("class-{}", number % machines + 1);
                let daemon = Caller::daemon();
                let _ = match number % 3 {
                    0 => fixture.service.stop(&name, true, &daemon).await,
                    1 => fixture.service.reset(&name, &daemon).await,
                    _ => fixture.service.start(&name, &daemon).await,
                };
                tokio::time::sleep(Duration::from_millis(40)).await;
            }
        }
    });
    for client in clients {
        client.await.unwrap();
    }
    disturbing.abort();
    keeping.abort();
    let mut seen = seen.lock().unwrap();
    assert_eq!(seen.holders.len(), 0);
    assert!(seen.used.len() > 100);
    seen.took.sort();
    let median = seen.took.get(seen.took.len() / 2).copied().unwrap_or_default();
    figure(&format!("median of {} claims of a ready machine", seen.took.len()), median);
}
