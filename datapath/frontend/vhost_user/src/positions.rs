//! The positions at which a server's queues ended. From them the next server recognises the machine that used
//! the disk.

/// The position of each queue of a machine when its server ended, with everything that it took answered, and
/// whether the machine had chosen write-through, which it reports only once.
///
/// With these the next server lets that machine continue. They may be passed on only together with the disk's
/// contents: if answered writes were lost, the machine must not continue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    queues: Vec<Option<u16>>,
    write_through: bool,
}

/// The text for: write-through was chosen.
const WRITE_THROUGH: &str = "write-through";

/// A running machine that has not used this disk, or has used another server since its known position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a running machine wants to continue at entry {base}, but {}: restart the machine",
    self.reason()
)]
pub(crate) struct ResumePositionFault {
    pub(crate) base: u16,
    pub(crate) ended_at: Option<u16>,
}

impl ResumePositionFault {
    fn reason(self) -> String {
        match self.ended_at {
            Some(position) => format!("it was served here up to entry {position}"),
            None => "it was never served here, or the server before this one did not end in order".into(),
        }
    }
}

impl Positions {
    pub(crate) fn get(&self, queue: usize) -> Option<u16> {
        self.queues.get(queue).copied().flatten()
    }

    pub(crate) fn write_through(&self) -> bool {
        self.write_through
    }

    pub(crate) fn set_write_through(&mut self, on: bool) {
        self.write_through = on;
    }

    pub(crate) fn set(&mut self, queue: usize, position: Option<u16>) {
        if queue >= self.queues.len() {
            self.queues.resize(queue.saturating_add(1), None);
        }
        if let Some(entry) = self.queues.get_mut(queue) {
            *entry = position;
        }
    }

    /// Parses the output of [`std::fmt::Display`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let bad = |word: &str| format!("'{word}' is not the position of a queue");
        let entry = |word: &str| match word {
            "-" => Ok(None),
            word => word.parse().map(Some).map_err(|_| bad(word)),
        };
        let words = text.split_whitespace();
        let write_through = words.clone().any(|word| word == WRITE_THROUGH);
        let queues = words.filter(|word| *word != WRITE_THROUGH).map(entry).collect::<Result<_, _>>()?;
        Ok(Self { queues, write_through })
    }
}

impl std::fmt::Display for Positions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.write_through {
            f.write_str(WRITE_THROUGH)?;
        }
        for (queue, position) in self.queues.iter().enumerate() {
            let space = if queue == 0 && !self.write_through { "" } else { " " };
            match position {
                Some(position) => write!(f, "{space}{position}")?,
                None => write!(f, "{space}-")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_survive_their_text() {
        let mut positions = Positions::default();
        assert_eq!(Positions::parse(&positions.to_string()), Ok(positions.clone()));
        positions.set(2, Some(65_535));
        positions.set(0, Some(0));
        assert_eq!(positions.to_string(), "0 - 65535");
        assert_eq!(Positions::parse("0 - 65535\n"), Ok(positions.clone()));
        assert_eq!((positions.get(1), positions.get(2), positions.get(3)), (None, Some(65_535), None));
        positions.set_write_through(true);
        assert_eq!(positions.to_string(), "write-through 0 - 65535");
        assert_eq!(Positions::parse(&positions.to_string()), Ok(positions.clone()));
        assert_ne!(Positions::parse("0 - 65535"), Ok(positions));
        for bad in ["x", "70000", "-1", "1 2 ?"] {
            assert!(Positions::parse(bad).is_err(), "{bad}");
        }
    }
}
