//! Compares sizes: the same operations run on each size in every round, so that disturbances of the machine
//! affect all sizes.

use std::sync::Arc;

use headwater_testkit::Rng;
use headwater_volume::Volume;

use crate::measure::{self, Cost, progress};
use crate::rows::{Goal, Report, Row, Series};
use crate::work::{self, BLOCK, MIB};

/// How much more than the smallest size a larger one may cost.
pub const GOAL: Goal = Goal::AtMost(1.2);

/// A prime number that divides no size here.
const STRIDE: u64 = 7_368_787;

/// One size.
pub struct Arm {
    pub name: String,
    pub volumes: Vec<Arc<Volume>>,
    pub rng: Rng,
    /// The next block of each volume that was never written.
    pub next: u64,
    /// Operations of [`Arm::overwrite_each_once`] so far.
    stridden: u64,
    pub data: Vec<u8>,
}

impl Arm {
    pub fn new(name: String, volumes: Vec<Arc<Volume>>) -> Self {
        let mut rng = Rng::new(4);
        let data = rng.bytes(MIB as usize);
        Self { name, volumes, rng, next: 0, stridden: 0, data }
    }

    fn block(data: &[u8], number: u64) -> &[u8] {
        let from = (number * BLOCK % MIB) as usize;
        &data[from..from + BLOCK as usize]
    }

    /// Writes blocks in order, `first` being the first one of each volume; the volumes take turns.
    pub fn write_in_order(&self, first: u64, blocks: u64) {
        let count = self.volumes.len() as u64;
        for number in 0..blocks {
            let volume = &self.volumes[(number % count) as usize];
            work::write(volume, first + number / count, Self::block(&self.data, number));
        }
    }

    /// Writes this many blocks that were never written.
    pub fn write_new(&mut self, blocks: u64) {
        self.write_in_order(self.next, blocks);
        self.next += blocks / self.volumes.len() as u64;
    }

    /// Overwrites random blocks below `below` of random volumes.
    pub fn overwrite(&mut self, first: u64, below: u64, operations: u64) {
        for number in 0..operations {
            let volume = &self.volumes[self.rng.index(self.volumes.len())];
            let block = first + self.rng.below(below - first);
            work::write(volume, block, Self::block(&self.data, number));
        }
    }

    /// Overwrites blocks below `below` of the first volume, each once in as many operations as there are blocks, as
    /// far apart as if they were chosen at random.
    pub fn overwrite_each_once(&mut self, below: u64, operations: u64) {
        for number in self.stridden..self.stridden + operations {
            work::write(&self.volumes[0], number * STRIDE % below, Self::block(&self.data, number));
        }
        self.stridden += operations;
    }

    /// Reads random blocks of random volumes.
    pub fn read(&mut self, first: u64, below: u64, operations: u64) {
        let mut into = vec![0; BLOCK as usize];
        for _ in 0..operations {
            let volume = &self.volumes[self.rng.index(self.volumes.len())];
            work::read(volume, first + self.rng.below(below - first), &mut into);
        }
    }
}

/// Runs the sizes in turns, and reports what the operations cost in each of them.
pub fn compare<A>(
    (case, what): (&'static str, &str),
    rounds: usize,
    arms: &mut [A],
    name: impl Fn(&A) -> String,
    mut work: impl FnMut(&mut A) -> Cost,
    (goal, report): (Goal, &mut Report),
) {
    let mut costs: Vec<Vec<Cost>> = arms.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for turn in 0..arms.len() {
            let index = (round + turn) % arms.len();
            costs[index].push(work(&mut arms[index]));
        }
    }
    progress(format_args!("{what}: {rounds} rounds"));
    for (kind, of) in [("time", (|c: &Cost| c.ns) as fn(&Cost) -> f64), ("processor", |c| c.processor_ns)] {
        let series = arms
            .iter()
            .zip(&costs)
            .map(|(arm, costs)| Series::new(name(arm), costs.iter().map(|cost| of(cost) / 1e3).collect()));
        report.add(Row::growth(case, format!("{what}: {kind}"), series.collect(), "us", goal));
    }
}

/// Like [`measure::cost_until_settled`], for a size.
pub fn settled_cost(arm: &mut Arm, operations: u64, run: impl FnOnce(&mut Arm)) -> Cost {
    let volumes = arm.volumes.clone();
    measure::cost_until_settled(operations, || run(arm), || measure::settle(&volumes))
}
