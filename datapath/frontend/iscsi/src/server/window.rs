//! The command window: which command numbers (CmdSN) are accepted, and in which order.
//!
//! Numbers wrap around, so a number is judged by its distance ahead of the next expected number. A command is open from when it
//! is accepted until it is answered. Immediate commands carry a number but do not use it up.

/// What to do with a numbered command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Process it: it is the next one.
    Now,
    /// Hold it back: an earlier command is missing.
    Hold,
    /// Ignore it: it is outside the window and counts as not received.
    Ignore,
}

/// The window of one session.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// The next expected number (ExpCmdSN).
    next: u32,
    /// The size of the window: how many commands may be open.
    depth: u32,
    /// How many commands are open.
    open: u32,
}

impl Window {
    /// A window without open commands.
    pub(super) fn new(next: u32, depth: u32) -> Self {
        Self { next, depth, open: 0 }
    }

    /// The next number that is expected (ExpCmdSN).
    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// The highest number that is accepted (MaxCmdSN). It never decreases: a command that is opened moves
    /// `next` by one and reduces the free part of the window by one.
    #[inline]
    pub(super) fn max(&self) -> u32 {
        self.next.wrapping_add(self.depth.saturating_sub(self.open)).wrapping_sub(1)
    }

    /// Decides whether a command of this number is processed now, held back or ignored.
    #[inline]
    pub(super) fn judge(&self, number: u32) -> Verdict {
        let ahead = number.wrapping_sub(self.next);
        if ahead == 0 && self.open < self.depth {
            Verdict::Now
        } else if ahead < self.depth.saturating_sub(self.open) {
            Verdict::Hold
        } else {
            Verdict::Ignore
        }
    }

    /// The next number is used up.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// A command was accepted, and is not answered yet.
    pub(super) fn open(&mut self) {
        self.open = self.open.saturating_add(1);
    }

    /// An open command was answered.
    pub(super) fn close(&mut self) {
        self.open = self.open.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_taken_in_order_within_the_window_across_the_wrap() {
        let mut window = Window::new(u32::MAX - 1, 4);
        assert_eq!(window.max(), 1);
        assert_eq!(window.judge(u32::MAX - 1), Verdict::Now);
        assert_eq!(window.judge(u32::MAX), Verdict::Hold);
        assert_eq!(window.judge(1), Verdict::Hold);
        assert_eq!(window.judge(2), Verdict::Ignore);
        assert_eq!(window.judge(u32::MAX - 2), Verdict::Ignore);
        for _ in 0..3 {
            window.advance();
            window.open();
            assert_eq!(window.max(), 1);
        }
        assert_eq!(window.next(), 1);
        assert_eq!(window.judge(1), Verdict::Now);
        window.advance();
        window.open();
        // The window is full: nothing is accepted until a command is answered.
        assert_eq!(window.max(), window.next().wrapping_sub(1));
        assert_eq!(window.judge(2), Verdict::Ignore);
        window.close();
        assert_eq!(window.judge(2), Verdict::Now);
        assert_eq!(window.max(), 2);
    }
}
