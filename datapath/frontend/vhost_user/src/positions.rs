//! Where queues stood when a server ended, so that the next one can tell the machine that used it from any other.

/// Where each queue of a machine stood when its server ended, everything that it took being answered.
///
/// A server that is given these by the one before it lets that machine go on. It is only right to pass them on
/// together with the contents: where answered writes were lost, the machine must not go on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Positions(Vec<Option<u16>>);

/// A machine that is running and has not used this disk, or not up to where it stands now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a machine that is running wants to go on at entry {base}, and {}: start it anew",
    self.reason()
)]
pub(crate) struct StrangerFault {
    pub(crate) base: u16,
    pub(crate) ended_at: Option<u16>,
}

impl StrangerFault {
    fn reason(self) -> String {
        match self.ended_at {
            Some(position) => format!("it was served here up to entry {position}"),
            None => "it was never served here, or the server before this one did not end in order".into(),
        }
    }
}

impl Positions {
    pub(crate) fn get(&self, queue: usize) -> Option<u16> {
        self.0.get(queue).copied().flatten()
    }

    pub(crate) fn set(&mut self, queue: usize, position: Option<u16>) {
        if queue >= self.0.len() {
            self.0.resize(queue.saturating_add(1), None);
        }
        if let Some(entry) = self.0.get_mut(queue) {
            *entry = position;
        }
    }

    /// Reads what [`std::fmt::Display`] wrote.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bad = |word: &str| format!("'{word}' is not the position of a queue");
        let entry = |word: &str| match word {
            "-" => Ok(None),
            word => word.parse().map(Some).map_err(|_| bad(word)),
        };
        text.split_whitespace().map(entry).collect::<Result<_, _>>().map(Self)
    }
}

impl std::fmt::Display for Positions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (queue, position) in self.0.iter().enumerate() {
            let space = if queue == 0 { "" } else { " " };
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
        for bad in ["x", "70000", "-1", "1 2 ?"] {
            assert!(Positions::parse(bad).is_err(), "{bad}");
        }
    }
}
