//! A model test of leases: random histories of controllers, nodes and connections. No machine may run twice, and all must
//! run at the end.

use std::collections::BTreeMap;

use super::lease::{NodeLease, Renewal, Renewals, interval_ms, movable_from_ms};

const LEASE_MS: u64 = 3_000;
const NODES: usize = 3;
const CONTROLLERS: usize = 2;
const MACHINES: usize = 4;

/// The real time of a step.
const STEP_MS: u64 = 100;

/// The longest time that a node takes to notice the end of its lease and to end its machines.
const FENCE_MS: u64 = 1_000;

/// The number of steps of a history before, and after, all faults are repaired.
const STEPS: u64 = 250;
const STEPS_HEALED: u64 = 250;

/// Rules that a test breaks on purpose, to prove that the model notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The controller does not wait for the end of the lease.
    Early,
    /// The controller renews leases without checking that it has the database.
    Blind,
    /// A new controller does not count from its own start.
    Forgetful,
    /// A node that reconnects gets a lease before it has removed the machines that were given to other hosts.
    KeepsCopies,
}

/// A pseudorandom generator; the same seed gives the same numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// A clock that runs up to 3 % too fast or too slow, and starts at a random time.
#[derive(Clone, Copy)]
struct Clock {
    began_ms: u64,
    per_mille: u64,
}

impl Clock {
    fn at(self, real_ms: u64) -> u64 {
        self.began_ms + real_ms * self.per_mille / 1000
    }
}

struct Node {
    clock: Clock,
    lease: NodeLease,
    /// The real time since which the lease has been over and machines are not ended yet.
    over_since_ms: Option<u64>,
    /// Whether the daemon runs. Machines run without it, and its guard ends them in time.
    is_up: bool,
    /// The highest generation (connection number) that the node has seen.
    generation: u64,
    /// The machines that the node has, and whether each should run.
    copies: BTreeMap<usize, bool>,
    runs: BTreeMap<usize, ()>,
}

/// A connection, as its controller sees it.
struct Link {
    generation: u64,
    renewals: Renewals,
    /// Whether the node has removed the machines of other hosts, so that it may get leases.
    is_cleared: bool,
    /// When the next renewal is sent, if the last one was answered or timed out.
    asks_at_ms: u64,
    asked: u64,
}

struct Controller {
    clock: Clock,
    is_up: bool,
    started_at_ms: u64,
    heard_at_ms: [Option<u64>; NODES],
    links: [Option<Link>; NODES],
    /// Whether it can reach the database.
    reaches_database: bool,
}

struct Host {
    generation: u64,
    is_lost: bool,
}

/// A message in transit.
enum Message {
    Renewal(Renewal),
    Answer(u64),
}

struct Packet {
    arrives_ms: u64,
    controller: usize,
    node: usize,
    generation: u64,
    message: Message,
}

struct World {
    fault: Fault,
    random: Random,
    now_ms: u64,
    nodes: Vec<Node>,
    controllers: Vec<Controller>,
    /// The index of the controller that has the database.
    owner: usize,
    /// Since when the other controller may take it.
    owner_silent_since_ms: Option<u64>,
    hosts: [Host; NODES],
    host_of: [usize; MACHINES],
    to_start: [bool; MACHINES],
    is_cut: [[bool; NODES]; CONTROLLERS],
    packets: Vec<Packet>,
    /// Whether messages are neither delayed nor lost any more.
    is_healed: bool,
    moves: u64,
    fences: u64,
}

impl World {
    fn new(seed: u64, fault: Fault) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let clock = |random: &mut Random| Clock {
            began_ms: random.below(1_000_000),
            per_mille: 970 + random.below(61),
        };
        let node = |random: &mut Random| Node {
            clock: clock(random),
            lease: NodeLease::default(),
            over_since_ms: None,
            is_up: true,
            generation: 0,
            copies: BTreeMap::new(),
            runs: BTreeMap::new(),
        };
        let mut nodes: Vec<Node> = (0..NODES).map(|_| node(&mut random)).collect();
        let controller = |random: &mut Random| {
            let clock = clock(random);
            Controller {
                clock,
                is_up: true,
                started_at_ms: clock.at(0),
                heard_at_ms: [None; NODES],
                links: [const { None }; NODES],
                reaches_database: true,
            }
        };
        let controllers = (0..CONTROLLERS).map(|_| controller(&mut random)).collect();
        let host_of: [usize; MACHINES] = std::array::from_fn(|machine| machine % NODES);
        for (machine, host) in host_of.into_iter().enumerate() {
            nodes[host].copies.insert(machine, true);
        }
        Self {
            fault,
            random,
            now_ms: 0,
            nodes,
            controllers,
            owner: 0,
            owner_silent_since_ms: None,
            hosts: [const { Host { generation: 0, is_lost: false } }; NODES],
            host_of,
            to_start: [false; MACHINES],
            is_cut: [[false; NODES]; CONTROLLERS],
            packets: Vec::new(),
            is_healed: false,
            moves: 0,
            fences: 0,
        }
    }

    fn has_database(&self, controller: usize) -> bool {
        self.owner == controller && self.controllers[controller].reaches_database
    }

    fn now_of(&self, controller: usize) -> u64 {
        self.controllers[controller].clock.at(self.now_ms)
    }

    /// Breaks or repairs something at random.
    fn disturb(&mut self) {
        let controller = usize::try_from(self.random.below(2)).unwrap();
        let node = usize::try_from(self.random.below(3)).unwrap();
        match self.random.below(40) {
            0 => self.is_cut[controller][node] = true,
            1 | 2 => self.is_cut[controller][node] = false,
            3 => self.nodes[node].is_up = false,
            4 | 5 => self.nodes[node].is_up = true,
            // The host reboots: its machines end, and the lease no longer counts.
            6 if self.random.one_in(4) => {
                self.nodes[node].runs.clear();
                self.nodes[node].lease = NodeLease::default();
            }
            7 => self.controllers[controller].reaches_database = false,
            8 | 9 => self.controllers[controller].reaches_database = true,
            10 => self.controllers[controller].is_up = false,
            11 | 12 => self.start_controller(controller),
            _ => {}
        }
    }

    fn start_controller(&mut self, controller: usize) {
        let now_ms = self.now_of(controller);
        let it = &mut self.controllers[controller];
        if !it.is_up {
            it.is_up = true;
            it.links = [const { None }; NODES];
            it.heard_at_ms = [None; NODES];
            it.started_at_ms = now_ms;
        }
    }

    /// The other controller takes the database over from one that is silent.
    fn take_over(&mut self) {
        let is_silent = !self.controllers[self.owner].is_up || !self.has_database(self.owner);
        if !is_silent {
            self.owner_silent_since_ms = None;
            return;
        }
        let since_ms = *self.owner_silent_since_ms.get_or_insert(self.now_ms);
        let other = 1 - self.owner;
        let may = self.controllers[other].is_up && self.controllers[other].reaches_database;
        if may && self.now_ms >= since_ms + 500 {
            self.owner = other;
            self.owner_silent_since_ms = None;
            let now_ms = self.now_of(other);
            // The former owner may not know it yet: its connections stay.
            let it = &mut self.controllers[other];
            it.links = [const { None }; NODES];
            if self.fault != Fault::Forgetful {
                it.heard_at_ms = [None; NODES];
                it.started_at_ms = now_ms;
            }
        }
    }

    fn connect(&mut self, node: usize) {
        let controller = self.owner;
        let can = self.nodes[node].is_up
            && self.controllers[controller].is_up
            && self.has_database(controller)
            && !self.is_cut[controller][node];
        let is_connected = self.controllers[controller].links[node]
            .as_ref()
            .is_some_and(|link| link.generation == self.nodes[node].generation);
        // A node that is connected to the former owner reconnects only after a while.
        let follows_other = self.controllers[1 - controller].is_up
            && self.controllers[1 - controller].links[node]
                .as_ref()
                .is_some_and(|link| link.generation == self.nodes[node].generation)
            && !self.is_cut[1 - controller][node];
        if !can || is_connected || (follows_other && !self.random.one_in(30)) {
            return;
        }
        let now_ms = self.now_of(controller);
        let host = &mut self.hosts[node];
        host.generation = host.generation.max(self.nodes[node].generation) + 1;
        host.is_lost = false;
        self.nodes[node].generation = host.generation;
        self.nodes[node].lease.connected();
        let link = Link {
            generation: host.generation,
            renewals: Renewals::default(),
            is_cleared: false,
            asks_at_ms: 0,
            asked: 0,
        };
        self.controllers[controller].links[node] = Some(link);
        self.controllers[controller].heard_at_ms[node] = Some(now_ms);
    }

    /// Whether a connection carries messages now.
    fn carries(&self, controller: usize, node: usize) -> bool {
        self.controllers[controller].is_up && self.nodes[node].is_up && !self.is_cut[controller][node]
    }

    /// A controller has nodes remove moved machines, gives them their machines, and renews leases.
    fn work(&mut self, controller: usize) {
        for node in 0..NODES {
            if !self.carries(controller, node) {
                continue;
            }
            let (has_database, now_ms) = (self.has_database(controller), self.now_of(controller));
            let fault = self.fault;
            let its_generation = self.nodes[node].generation;
            let Some(link) = &mut self.controllers[controller].links[node] else { continue };
            if link.generation != its_generation {
                // The node has a newer connection, and refuses this one.
                self.controllers[controller].links[node] = None;
                continue;
            }
            if has_database && self.random.one_in(3) {
                let host_of = self.host_of;
                self.nodes[node].copies.retain(|machine, _| host_of[*machine] == node);
                let copies = &self.nodes[node].copies;
                let gone = |machine: &usize| !copies.contains_key(machine);
                let gone: Vec<usize> = self.nodes[node].runs.keys().copied().filter(|it| gone(it)).collect();
                for machine in gone {
                    self.nodes[node].runs.remove(&machine);
                }
                link.is_cleared = true;
                self.give(node);
                continue;
            }
            if (link.is_cleared || fault == Fault::KeepsCopies) && now_ms >= link.asks_at_ms {
                link.asks_at_ms = now_ms + 4 * interval_ms(LEASE_MS);
                let renewal = link.renewals.next(LEASE_MS);
                link.asked = renewal.number;
                let generation = link.generation;
                self.send(controller, node, generation, Message::Renewal(renewal));
            }
        }
    }

    /// A node gets the machines of its host, and starts those that were moved to it.
    fn give(&mut self, node: usize) {
        for machine in 0..MACHINES {
            if self.host_of[machine] == node {
                let wanted = self.nodes[node].copies.entry(machine).or_insert(false);
                if self.to_start[machine] {
                    *wanted = true;
                    self.to_start[machine] = false;
                }
            }
        }
    }

    fn send(&mut self, controller: usize, node: usize, generation: u64, message: Message) {
        let is_slow = !self.is_healed && self.random.one_in(6);
        let delay_ms = if is_slow { self.random.below(2 * LEASE_MS) } else { self.random.below(300) };
        let arrives_ms = self.now_ms + delay_ms;
        if self.is_healed || !self.random.one_in(10) {
            self.packets.push(Packet { arrives_ms, controller, node, generation, message });
        }
    }

    fn deliver(&mut self) {
        let now_ms = self.now_ms;
        let (due, later) =
            std::mem::take(&mut self.packets).into_iter().partition(|it: &Packet| it.arrives_ms <= now_ms);
        self.packets = later;
        for Packet { controller, node, generation, message, .. } in due {
            if !self.carries(controller, node) {
                continue;
            }
            let its_now_ms = self.now_of(controller);
            match message {
                Message::Renewal(renewal) if generation == self.nodes[node].generation => {
                    let now_ms = self.nodes[node].clock.at(self.now_ms);
                    self.nodes[node].lease.answer(renewal, now_ms);
                    self.send(controller, node, generation, Message::Answer(renewal.number));
                }
                Message::Answer(number) => {
                    let has_database = self.has_database(controller);
                    let is_its = |host: &Host| host.generation == generation && !host.is_lost;
                    let is_its = is_its(&self.hosts[node]);
                    let it = &mut self.controllers[controller];
                    let Some(link) = it.links[node].as_mut().filter(|link| link.generation == generation)
                    else {
                        continue;
                    };
                    // A late answer belongs to a request that has timed out.
                    if number != link.asked {
                        continue;
                    }
                    it.heard_at_ms[node] = Some(its_now_ms);
                    if (has_database && is_its) || self.fault == Fault::Blind {
                        link.renewals.heard(number);
                        link.asks_at_ms = its_now_ms + interval_ms(LEASE_MS);
                    } else if has_database {
                        it.links[node] = None;
                    }
                }
                Message::Renewal(_) => {}
            }
        }
    }

    /// The controller gives the machines of hosts whose lease is over to other hosts.
    fn move_lost(&mut self) {
        let controller = self.owner;
        if !self.controllers[controller].is_up || !self.has_database(controller) {
            return;
        }
        let now_ms = self.now_of(controller);
        for host in 0..NODES {
            let it = &self.controllers[controller];
            let heard_at_ms = it.heard_at_ms[host].unwrap_or(0).max(it.started_at_ms);
            let from_ms = match self.fault {
                Fault::Early => heard_at_ms + LEASE_MS / 2,
                _ => movable_from_ms(heard_at_ms, LEASE_MS),
            };
            let is_there =
                |node: &usize| *node != host && it.links[*node].is_some() && self.carries(controller, *node);
            let to = (0..NODES).find(is_there);
            let (true, Some(to)) = (now_ms >= from_ms, to) else { continue };
            if !self.host_of.contains(&host) {
                continue;
            }
            self.hosts[host].is_lost = true;
            for machine in 0..MACHINES {
                if self.host_of[machine] == host {
                    self.host_of[machine] = to;
                    self.to_start[machine] = true;
                    self.moves += 1;
                }
            }
            self.controllers[controller].links[host] = None;
        }
    }

    /// Nodes start and end their machines.
    fn run_nodes(&mut self) {
        let now_ms = self.now_ms;
        for node in &mut self.nodes {
            if !node.lease.is_over(node.clock.at(now_ms)) {
                node.over_since_ms = None;
                if node.is_up {
                    let wanted = node.copies.iter().filter(|it| *it.1);
                    node.runs.extend(wanted.map(|it| (*it.0, ())));
                }
                continue;
            }
            let since_ms = *node.over_since_ms.get_or_insert(now_ms);
            // The node ends them at the latest then, and at random before.
            if now_ms + STEP_MS >= since_ms + FENCE_MS || self.random.one_in(5) {
                self.fences += u64::try_from(node.runs.len()).unwrap();
                node.runs.clear();
            }
        }
    }

    /// A machine that runs on two hosts, if there is one.
    fn twice(&self) -> Option<usize> {
        let runs = |machine: usize| self.nodes.iter().filter(|node| node.runs.contains_key(&machine)).count();
        (0..MACHINES).find(|machine| runs(*machine) > 1)
    }

    fn step(&mut self) -> Result<(), String> {
        self.now_ms += STEP_MS;
        self.deliver();
        self.take_over();
        for node in 0..NODES {
            self.connect(node);
        }
        for controller in 0..CONTROLLERS {
            self.work(controller);
        }
        self.move_lost();
        self.run_nodes();
        match self.twice() {
            Some(machine) => Err(format!("machine {machine} runs twice at {} ms", self.now_ms)),
            None => Ok(()),
        }
    }

    fn heal(&mut self) {
        self.is_healed = true;
        self.is_cut = [[false; NODES]; CONTROLLERS];
        for node in &mut self.nodes {
            node.is_up = true;
        }
        for controller in 0..CONTROLLERS {
            self.controllers[controller].reaches_database = true;
            self.start_controller(controller);
        }
    }
}

/// Runs a history, and returns how many machines were moved and fenced.
fn history(seed: u64, fault: Fault) -> Result<(u64, u64), String> {
    let mut world = World::new(seed, fault);
    for _ in 0..STEPS {
        world.disturb();
        world.step()?;
    }
    world.heal();
    for _ in 0..STEPS_HEALED {
        world.step()?;
    }
    for (machine, host) in world.host_of.into_iter().enumerate() {
        if !world.nodes[host].runs.contains_key(&machine) {
            return Err(format!("machine {machine} does not run on its host at the end"));
        }
    }
    Ok((world.moves, world.fences))
}

#[test]
fn no_machine_runs_twice_and_all_run_again() {
    let (mut moves, mut fences) = (0, 0);
    for seed in 0..10_000 {
        let (moved, fenced) =
            history(seed, Fault::None).unwrap_or_else(|why| panic!("history {seed}: {why}"));
        moves += moved;
        fences += fenced;
    }
    assert!(moves > 10_000 && fences > 10_000, "{moves} moves and {fences} fences are too few to prove much");
}

#[test]
fn the_model_notices_each_rule_that_is_broken() {
    for fault in [Fault::Early, Fault::Blind, Fault::Forgetful, Fault::KeepsCopies] {
        let found = (0..10_000).find_map(|seed| history(seed, fault).err());
        assert!(found.is_some_and(|why| why.contains("twice")), "{fault:?} was not noticed");
    }
}
