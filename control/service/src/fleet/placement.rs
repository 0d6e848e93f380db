//! Chooses the host of a machine that is created, moved, or started again because its host is lost. Makes no I/O: it gets the hosts and
//! their machines, and counts each placed machine in the candidates.
//!
//! A host has room for a machine if its memory suffices for all its machines that are on, or are to be on, and for this one, each with its
//! write cache in RAM. Of the hosts with room, the one is chosen that would have most memory left if all its machines were on. So machines
//! of a catalog are spread even while they are off. Machines that boot from the network have their own hardware and do not count.

use headwater_api::BootFrom;
use headwater_db::{HostRecord, MachineRecord};
use uuid::Uuid;

/// Why a host is not chosen.
const IS_CORDONED: &str = "is cordoned";
const IS_AWAY: &str = "is not connected";

/// A host that a machine may go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Its identity.
    pub(crate) id: Uuid,
    /// Its name.
    pub(crate) name: String,
    why_not: Option<&'static str>,
    memory_bytes: u64,
    /// The memory that is left by machines that are on or are to be on. Negative if they use more than there is.
    left_bytes: i128,
    /// The memory that would be left if all its machines were on.
    left_of_all_bytes: i128,
}

impl Candidate {
    /// A host, with the memory that its machines among those of the fleet need.
    pub(crate) fn new(host: &HostRecord, is_there: bool, machines: &[MachineRecord]) -> Self {
        let why_not = match (host.cordoned, is_there) {
            (true, _) => Some(IS_CORDONED),
            (_, false) => Some(IS_AWAY),
            _ => None,
        };
        let of_host = || machines.iter().filter(|it| it.host == host.id && it.boot == BootFrom::Vm);
        let taken: i128 = of_host().filter(|it| is_wanted(it)).map(|it| i128::from(need_of(it))).sum();
        Self {
            id: host.id,
            name: host.name.clone(),
            why_not,
            memory_bytes: host.memory_bytes,
            left_bytes: i128::from(host.memory_bytes) - taken,
            left_of_all_bytes: free_memory(host, machines),
        }
    }

    /// Excludes the host, because its node is not connected or not ready.
    pub(crate) fn exclude(&mut self) {
        self.why_not.get_or_insert(IS_AWAY);
    }

    fn has_room(&self, need_bytes: u64) -> bool {
        self.why_not.is_none() && self.left_bytes >= i128::from(need_bytes)
    }
}

/// The memory that would be left if all machines of the host were on; negative if there is not enough for all.
pub(crate) fn free_memory(host: &HostRecord, machines: &[MachineRecord]) -> i128 {
    let of_host = machines.iter().filter(|it| it.host == host.id && it.boot == BootFrom::Vm);
    let taken: i128 = of_host.map(|it| i128::from(need_of(it))).sum();
    i128::from(host.memory_bytes) - taken
}

fn is_wanted(machine: &MachineRecord) -> bool {
    machine.is_to_be_on() || machine.state.is_active()
}

/// The memory that a machine uses on its host while it is on.
pub(crate) fn need_of(machine: &MachineRecord) -> u64 {
    machine.memory_bytes.saturating_add(machine.cache.ram_bytes)
}

/// No host has room.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no host has room for a machine with {} of memory: {}", mib(*.need_bytes), .hosts.join("; "))]
pub(crate) struct NoRoom {
    need_bytes: u64,
    /// Each host, and why it has no room.
    hosts: Vec<String>,
}

/// Chooses a host for a machine that needs this memory, and counts the machine there.
pub(crate) fn place(candidates: &mut [Candidate], need_bytes: u64) -> Result<Uuid, NoRoom> {
    let with_room = candidates.iter_mut().filter(|it| it.has_room(need_bytes));
    // `max_by_key` takes the last of several equal hosts, so the order of hosts counts.
    if let Some(chosen) = with_room.max_by_key(|it| it.left_of_all_bytes) {
        chosen.left_bytes -= i128::from(need_bytes);
        chosen.left_of_all_bytes -= i128::from(need_bytes);
        return Ok(chosen.id);
    }
    let said = |it: &Candidate| match it.why_not {
        Some(why) => format!("'{}' {why}", it.name),
        None => {
            let left = mib(u64::try_from(it.left_bytes.max(0)).unwrap_or(u64::MAX));
            format!("'{}' has {left} left of {}", it.name, mib(it.memory_bytes))
        }
    };
    Err(NoRoom { need_bytes, hosts: candidates.iter().map(said).collect() })
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u128, why_not: Option<&'static str>, left_mib: i128) -> Candidate {
        Candidate {
            id: Uuid::from_u128(id),
            name: format!("h{id}"),
            why_not,
            memory_bytes: 1 << 30,
            left_bytes: left_mib << 20,
            left_of_all_bytes: left_mib << 20,
        }
    }

    #[test]
    fn machines_are_spread_and_no_host_gets_more_than_it_has() {
        let mut hosts =
            [candidate(1, None, 300), candidate(2, None, 500), candidate(3, Some(IS_CORDONED), 900)];
        let mut counts = [0; 4];
        let refused = loop {
            match place(&mut hosts, 100 << 20) {
                Ok(id) => counts[usize::try_from(id.as_u128()).unwrap()] += 1,
                Err(refused) => break refused,
            }
        };
        assert_eq!(counts, [0, 3, 5, 0]);
        assert_eq!(
            refused.to_string(),
            "no host has room for a machine with 100 MiB of memory: 'h1' has 0 MiB left of 1024 MiB; 'h2' has 0 MiB left of 1024 MiB; 'h3' is cordoned"
        );
    }

    #[test]
    fn machines_that_are_off_count_for_the_spread_and_not_for_room() {
        // All its machines together would need more than there is, but few of them are on.
        let mut full = candidate(1, None, 800);
        full.left_of_all_bytes = -1;
        let mut hosts = [full, candidate(2, None, 200)];
        let chosen: Vec<u128> =
            (0..3).map(|_| place(&mut hosts, 150 << 20).map_or(0, |id| id.as_u128())).collect();
        assert_eq!(chosen, [2, 1, 1]);
    }
}
