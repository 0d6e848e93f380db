//! Sums the counters of all machines' disks since the process that serves them started, including machines that are off now. So the
//! host's metrics never decrease when a disk closes. [`super::disks`] reports each disk that it opens and closes.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use headwater_api::Sample;
use headwater_api::metrics::{Kind, family};
use headwater_volume::Volume;
use parking_lot::Mutex;

/// The prefix of every metric's name.
const PREFIX: &str = "headwater_";

/// The prefix of the metrics of the host.
const HOST_PREFIX: &str = "headwater_host_";

type Sums = BTreeMap<(String, BTreeMap<String, String>), f64>;

/// Sums the counters of all machines' disks since the daemon started, including machines that are off now.
#[derive(Default)]
pub struct Totals(Mutex<State>);

#[derive(Default)]
struct State {
    open: Vec<Weak<Volume>>,
    /// The sums of the volumes that are closed.
    closed: Sums,
}

impl Totals {
    /// Adds a volume that was opened.
    pub fn opened(&self, volume: &Arc<Volume>) {
        self.0.lock().open.push(Arc::downgrade(volume));
    }

    /// Adds the final counters of a volume to the sums. Only the first call for a volume has an effect.
    pub fn closed(&self, volume: &Arc<Volume>) {
        let mut state = self.0.lock();
        let before = state.open.len();
        state.open.retain(|open| !std::ptr::eq(open.as_ptr(), Arc::as_ptr(volume)));
        if state.open.len() < before {
            add(&mut state.closed, super::metrics::volume(&volume.counters()));
        }
    }

    /// The sums as metrics of the host.
    pub fn samples(&self) -> Vec<Sample> {
        let state = self.0.lock();
        let mut sums = state.closed.clone();
        // So that each metric exists from the beginning: a counter that appears later looks like a jump.
        add(&mut sums, super::metrics::volume(&headwater_volume::VolumeCounters::default()));
        for volume in state.open.iter().filter_map(Weak::upgrade) {
            add(&mut sums, super::metrics::volume(&volume.counters()));
        }
        let sample = |((metric, labels), value)| Sample { metric, labels, value };
        sums.into_iter().map(sample).collect()
    }
}

/// Adds the samples that can be summed: counters, and sums and counts of summaries.
fn add(sums: &mut Sums, samples: Vec<Sample>) {
    for sample in samples {
        let Some(family) = family(&sample.metric) else { continue };
        let adds_up = match family.kind {
            Kind::Counter => true,
            Kind::Gauge => false,
            Kind::Summary => sample.metric != family.name,
        };
        if let (true, Some(rest)) = (adds_up, sample.metric.strip_prefix(PREFIX)) {
            *sums.entry((format!("{HOST_PREFIX}{rest}"), sample.labels)).or_default() += sample.value;
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_api::metrics::FAMILIES;

    use super::*;

    #[test]
    fn every_counter_of_a_machine_has_one_of_the_host() {
        let of_machines = FAMILIES
            .iter()
            .filter(|family| family.labels.first() == Some(&"machine") && family.kind != Kind::Gauge);
        let samples = Totals::default().samples();
        for machine in of_machines {
            let name = machine.name.replacen(PREFIX, HOST_PREFIX, 1);
            let host = family(&name).unwrap_or_else(|| panic!("{name} is no metric"));
            assert_eq!(host.kind, machine.kind);
            let labels: Vec<_> =
                machine.labels.iter().filter(|l| !["machine", "quantile"].contains(l)).collect();
            assert_eq!(host.labels.iter().collect::<Vec<_>>(), labels, "{name}");
            assert!(
                samples.iter().any(|sample| family(&sample.metric).is_some_and(|f| f.name == name)),
                "{name}"
            );
        }
    }
}
